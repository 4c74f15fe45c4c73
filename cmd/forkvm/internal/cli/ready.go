package cli

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/pflag"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/node"
)

// readyFlags say what a guest has to have reached before something is done with it.
type readyFlags struct {
	conditions []string
	timeout    time.Duration
}

// add adds the flags of what waits for nothing else.
func (r *readyFlags) add(f *pflag.FlagSet) {
	r.addConditions(f)
	f.DurationVar(&r.timeout, "ready-timeout", node.DefaultReadyTimeout, "how long to wait for --ready")
}

func (r *readyFlags) addConditions(f *pflag.FlagSet) {
	f.StringArrayVar(&r.conditions, "ready", nil, "wait for command:SCRIPT, port:NUMBER-OR-PATH, file:PATH or unit:NAME; all of them, if there are several")
}

func (r *readyFlags) parse() ([]client.Condition, error) {
	var list []client.Condition
	for _, s := range r.conditions {
		c, err := client.ParseCondition(s)
		if err != nil {
			return nil, &usageError{err}
		}
		list = append(list, c)
	}
	return list, nil
}

// wait returns when the guest has reached the conditions, or says which it has not.
func (r *readyFlags) wait(ctx context.Context, vm VM, conditions []client.Condition) error {
	if len(conditions) == 0 {
		return nil
	}
	if _, err := runningStatus(ctx, vm); err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	err := vm.Guest().WaitFor(limited, conditions...)
	var missing *client.NotReadyError
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.As(err, &missing):
		return failure.New(failure.GuestNotReady, "after %v %w", r.timeout, err)
	}
	return execFailure(ctx, vm, err)
}
