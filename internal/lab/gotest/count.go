package gotest

import (
	"bytes"
	"fmt"
)

// counter counts the verdicts in the verbose output of a test binary. Subtests, which are indented, are not counted.
// A machine writes to the streams of one command from one goroutine, so there is no lock.
type counter struct {
	line                    []byte
	passed, failed, skipped int
}

// maxLine is how much of a line is looked at.
const maxLine = 64

func (c *counter) Write(p []byte) (int, error) {
	for _, b := range p {
		if b != '\n' {
			if len(c.line) < maxLine {
				c.line = append(c.line, b)
			}
			continue
		}
		switch {
		case bytes.HasPrefix(c.line, []byte("--- PASS: ")):
			c.passed++
		case bytes.HasPrefix(c.line, []byte("--- FAIL: ")):
			c.failed++
		case bytes.HasPrefix(c.line, []byte("--- SKIP: ")):
			c.skipped++
		}
		c.line = c.line[:0]
	}
	return len(p), nil
}

// note is what the closing line of a package says of the numbers.
func (c *counter) note() string {
	switch {
	case c.passed+c.failed+c.skipped == 0:
		return " [no tests to run]"
	case c.skipped > 0:
		return fmt.Sprintf(" (lab: %d passed, %d skipped)", c.passed, c.skipped)
	}
	return fmt.Sprintf(" (lab: %d passed)", c.passed)
}
