package main

import (
	"encoding/json"
	"errors"
	"io"
	"os"

	"github.com/forkvm/forkvm/internal/testkit/attempt"
)

// attempts does what standard input says, one attempt after the other, and prints what came of each.
func attempts([]string) error {
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var a attempt.Attempt
		if err := in.Decode(&a); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := out.Encode(a.Do()); err != nil {
			return err
		}
	}
}
