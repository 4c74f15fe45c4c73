package main

import (
	_ "embed"
	"fmt"
	"strings"
)

//go:embed interpreter.py
var interpreter string

// interpreterDir is in the guest's memory. The answer pipe is the last that it makes there.
const (
	interpreterDir   = "/dev/shm/interpreter"
	interpreterReady = "file:" + interpreterDir + "/answer"
)

// startInterpreter leaves a Python running that the snapshot will have, as warm
// interpreters of policies are.
func (t *tour) startInterpreter(name string) error {
	_, err := t.forkvm("exec", "-d", "-u", "dev", name, "--", "python3", "-c", interpreter, interpreterDir)
	return err
}

// draws asks the interpreter of each machine for random values: all of them were
// one process when the task was frozen, and no two may give the same.
func (t *tour) draws(vms []*vm) error {
	t.say("The Python that was running when the task was frozen now runs in each of them, and draws random values.")
	owners := map[string]string{}
	for _, v := range vms {
		ask := fmt.Sprintf("echo > %[1]s/ask; cat %[1]s/answer", interpreterDir)
		out, err := t.forkvm("exec", "-u", "dev", v.name, "--", "sh", "-c", ask)
		if err != nil {
			return err
		}
		values := strings.Fields(out)
		if len(values) != 4 {
			return fmt.Errorf("the interpreter of %s says %q", v.name, out)
		}
		for _, value := range values {
			if other, had := owners[value]; had {
				return fmt.Errorf("%s and %s drew the same value: %s", other, v.name, value)
			}
			owners[value] = v.name
		}
	}
	fmt.Printf("\nChecked: %d values of random, uuid, secrets and TLS hellos, no two the same.\n", len(owners))
	return nil
}
