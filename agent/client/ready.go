package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/forkvm/forkvm/agent/proto"
)

// Condition is something that a guest is waited for: a Kind and what it is about.
type Condition struct {
	Kind  ConditionKind
	Value string
}

// ConditionKind says what a Condition is about.
type ConditionKind string

// Kinds of conditions.
const (
	// ReadyCommand: a shell command ends with exit code 0.
	ReadyCommand ConditionKind = "command"
	// ReadyPort: something accepts connections at a TCP port of the loopback
	// address, or at a Unix socket, given by its path.
	ReadyPort ConditionKind = "port"
	// ReadyFile: there is something under an absolute path.
	ReadyFile ConditionKind = "file"
	// ReadyUnit: a unit of systemd is active.
	ReadyUnit ConditionKind = "unit"
)

// ParseCondition reads KIND:VALUE.
func ParseCondition(s string) (Condition, error) {
	kind, value, _ := strings.Cut(s, ":")
	c := Condition{ConditionKind(kind), value}
	kinds := []ConditionKind{ReadyCommand, ReadyPort, ReadyFile, ReadyUnit}
	if value == "" || !slices.Contains(kinds, c.Kind) {
		return c, fmt.Errorf("parse condition %q: neither command:…, port:…, file:… nor unit:…", s)
	}
	return c, nil
}

// String is the form that ParseCondition reads.
func (c Condition) String() string { return string(c.Kind) + ":" + c.Value }

// NotReadyError says which conditions a guest had not reached in time.
type NotReadyError struct{ Missing []Missing }

// Missing is a condition that was not reached, and what was last seen of it.
type Missing struct {
	Condition Condition
	Reason    string
}

// Error implements error.
func (e *NotReadyError) Error() string {
	var list []string
	for _, m := range e.Missing {
		list = append(list, fmt.Sprintf("%v (%s)", m.Condition, m.Reason))
	}
	return "guest is not ready: " + strings.Join(list, ", ")
}

// Pauses between two looks at a condition.
const (
	firstReadyPause = 20 * time.Millisecond
	lastReadyPause  = time.Second
)

// WaitFor waits until the guest has reached each of the conditions, which are looked
// at side by side and each until it is met once. When ctx is done before, the error is
// a *NotReadyError; any other means that the guest cannot be asked. The client's
// Observer is not told of each look.
func (c *Client) WaitFor(ctx context.Context, conditions ...Condition) error {
	c = New(c.cfg)
	c.cfg.Observer = nil
	reasons, errs := make([]string, len(conditions)), make([]error, len(conditions))
	var all sync.WaitGroup
	for i, condition := range conditions {
		all.Go(func() { reasons[i], errs[i] = c.waitForOne(ctx, condition) })
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	var missing []Missing
	for i, reason := range reasons {
		if reason != "" {
			missing = append(missing, Missing{conditions[i], reason})
		}
	}
	if len(missing) > 0 {
		return &NotReadyError{missing}
	}
	return nil
}

// waitForOne returns why a condition was not reached, or "".
func (c *Client) waitForOne(ctx context.Context, condition Condition) (reason string, err error) {
	for pause := firstReadyPause; ; pause = min(2*pause, lastReadyPause) {
		seen, err := c.look(ctx, condition)
		if ctx.Err() != nil || overdue(ctx) {
			// The last look was cut short, the one before was not.
			if reason == "" {
				reason = "not known in time"
			}
			return reason, nil
		}
		if err != nil || seen == "" {
			return "", err
		}
		reason = seen
		select {
		case <-ctx.Done():
			return reason, nil
		case <-time.After(pause):
		}
	}
}

// look returns what is missing of a condition, or "". An error is one that waiting
// does not help against.
func (c *Client) look(ctx context.Context, condition Condition) (missing string, err error) {
	switch condition.Kind {
	case ReadyCommand:
		return c.lookAtCommand(ctx, "sh", "-c", condition.Value)
	case ReadyUnit:
		return c.lookAtCommand(ctx, "systemctl", "is-active", "--", condition.Value)
	case ReadyFile:
		_, err = c.Stat(ctx, condition.Value)
	case ReadyPort:
		network, address := "tcp", ":"+condition.Value
		if strings.HasPrefix(condition.Value, "/") {
			network, address = "unix", condition.Value
		}
		var conn *Conn
		if conn, err = c.Dial(ctx, network, address); err == nil {
			conn.Close()
		}
	default:
		return "", fmt.Errorf("wait for %v: no such kind of condition", condition)
	}
	return notYet(err)
}

// notYet tells what may still come from what will not.
func notYet(err error) (missing string, _ error) {
	var answered *Error
	switch {
	case err == nil:
		return "", nil
	case !errors.As(err, &answered), answered.Code == proto.CodeUnsupported, answered.Code == proto.CodeInvalidRequest, answered.Code == proto.CodeGenerationMismatch:
		return "", err
	}
	return answered.Message, nil
}

// lookAtCommand runs a command and returns how it ended, with the last line that it
// wrote, or "" if it succeeded.
func (c *Client) lookAtCommand(ctx context.Context, args ...string) (missing string, err error) {
	var out bytes.Buffer
	r, err := c.Exec(ctx, Command{Args: args, Stdout: &out, Stderr: &out, StdoutLimit: 4096})
	if err != nil || r.ExitCode == 0 {
		return notYet(err)
	}
	if r.Error != nil {
		return r.Error.Message, nil
	}
	missing = fmt.Sprintf("exit code %d", r.ExitCode)
	text := strings.TrimSpace(out.String())
	if last := text[strings.LastIndexByte(text, '\n')+1:]; last != "" {
		missing += ": " + last
	}
	return missing, nil
}
