package main

import (
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

//go:embed interpreter.py
var interpreter []byte

// interpreterDir is in the guest's memory.
const interpreterDir = "/dev/shm/interpreter"

// startInterpreter leaves a Python running that the snapshot will have, as warm
// interpreters of policies are.
func (t *tour) startInterpreter(name string) error {
	if _, err := t.forkvm("exec", "-u", "dev", name, "--", "mkdir", interpreterDir); err != nil {
		return err
	}
	if err := t.put(name, interpreterDir+"/interpreter.py", interpreter); err != nil {
		return err
	}
	start := fmt.Sprintf("setsid python3 %[1]s/interpreter.py 2>%[1]s/errors & "+
		"until [ -p %[1]s/answer ]; do [ ! -s %[1]s/errors ] || { cat %[1]s/errors >&2; exit 1; }; sleep 0.1; done", interpreterDir)
	_, err := t.forkvm("exec", "-u", "dev", name, "--", "sh", "-c", start)
	return err
}

// put writes a file in a machine.
func (t *tour) put(name, path string, contents []byte) error {
	dir, err := os.MkdirTemp("", "tour")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	local := filepath.Join(dir, filepath.Base(path))
	if err := os.WriteFile(local, contents, 0o644); err != nil {
		return err
	}
	_, err = t.forkvm("cp", local, name+":"+path)
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
