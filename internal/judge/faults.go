package judge

import (
	"context"
	"errors"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/vmm"
)

// answered is the guest agent's word for what went wrong, empty if it did not answer.
func answered(err error) string {
	var e *client.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

// byGuest reports whether a machine did not come up because of what is in its guest:
// a hook that fails or never ends, a guest that ends itself, an agent that is gone.
func byGuest(err error) bool {
	var unconfirmed *client.UnconfirmedError
	switch {
	case errors.As(err, &unconfirmed):
		return true
	case failure.Is(err, failure.IdentityUnconfirmed), failure.Is(err, failure.GuestEnded), failure.Is(err, failure.GuestNotReady):
		return true
	}
	var end *EndedError
	return errors.As(err, &end) && end.ByGuest
}

// EndedError is of a guest whose life was over before it was ready.
type EndedError struct {
	Health
	Err error
}

// Error implements error.
func (e *EndedError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *EndedError) Unwrap() error { return e.Err }

// settled is a machine's health after an error. One whose connection broke may be
// about to end: that is waited for, for a moment.
func settled(ctx context.Context, m Machine, err error) Health {
	// The step's own time may be what has run out.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), healthTimeout)
	defer cancel()
	for deadline := time.Now().Add(settleTime); ; {
		h := m.Health(ctx)
		if h.Ended != "" || h.Storage != nil || answered(err) != "" || time.Now().After(deadline) {
			return h
		}
		time.Sleep(20 * time.Millisecond)
	}
}

const (
	healthTimeout = 30 * time.Second
	settleTime    = 2 * time.Second
)

// EndOf says what the end of a guest means to a judge.
func EndOf(exit *vmm.Exit) Health {
	h := Health{Ended: exit.Error()}
	switch exit.Reason {
	case vmm.ReasonShutdown, vmm.ReasonReset, vmm.ReasonGuestPanic, vmm.ReasonTripleFault:
		h.ByGuest = true
	}
	return h
}

// NotReady is for Machines.Fork: it marks the error of a guest whose life was over
// before it was ready.
func NotReady(err error) error {
	var exit *vmm.Exit
	if errors.As(err, &exit) {
		return &EndedError{Health: EndOf(exit), Err: err}
	}
	return err
}

// fault finds out whose fault a failed step in a machine is. whose is the outcome if
// the guest's own programs are the reason.
func (r *Result) fault(ctx context.Context, m Machine, whose Outcome, err error) *Result {
	h := settled(ctx, m, err)
	switch code := answered(err); {
	case h.Storage != nil:
		return r.fail(InfraError, ReasonHostStorage, h.Storage.Error())
	case h.Ended != "" && h.ByGuest:
		return r.fail(whose, ReasonGuestEnded, "the guest has ended: "+h.Ended)
	case h.Ended != "":
		return r.fail(InfraError, ReasonMachine, "the machine has ended: "+h.Ended)
	case code == proto.CodeUnsupported:
		return r.fail(InfraError, ReasonUnsupported, "the guest agent in the snapshot is too old: "+err.Error())
	case code == proto.CodeNoSpace:
		return r.fail(VerifierError, ReasonNoSpace, err.Error())
	case code == "" || code == proto.CodeTooManyOperations || code == proto.CodeResourceExhausted || code == proto.CodeInternal:
		return r.fail(InfraError, ReasonMachine, err.Error())
	}
	return r.fail(whose, ReasonGuestRefused, err.Error())
}
