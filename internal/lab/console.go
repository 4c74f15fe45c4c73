package lab

import (
	"bytes"
	"io"
	"regexp"
	"strings"
	"sync"
)

// consoleLines is how many of the console's last lines an error shows: a panic with its registers and stack, and what came
// before it.
const consoleLines = 120

// escapeSequence is what the firmware sends to a terminal that is not there.
var escapeSequence = regexp.MustCompile(`\x1b(\[[0-9;?]*[A-Za-z]|[a-z])`)

// console keeps the last lines of the machine's console and knows a panic when it sees one.
type console struct {
	log io.Writer // may be nil

	mu       sync.Mutex
	lines    []string
	partial  []byte
	panicked bool
}

// Write takes console output. It never fails; what the log makes of it is not the machine's business.
func (c *console) Write(p []byte) (int, error) {
	if c.log != nil {
		_, _ = c.log.Write(p)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	rest := p
	for {
		line, after, found := bytes.Cut(rest, []byte{'\n'})
		c.partial = append(c.partial, line...)
		if !found {
			return len(p), nil
		}
		c.endLineLocked()
		rest = after
	}
}

func (c *console) endLineLocked() {
	line := strings.TrimRight(escapeSequence.ReplaceAllString(string(c.partial), ""), "\r")
	c.partial = c.partial[:0]
	if strings.Contains(line, "Kernel panic - not syncing") {
		c.panicked = true
	}
	if strings.TrimSpace(line) == "" {
		return
	}
	if c.lines = append(c.lines, line); len(c.lines) > consoleLines {
		c.lines = c.lines[len(c.lines)-consoleLines:]
	}
}

// last returns the last lines, an unfinished one included, and whether the kernel has panicked.
func (c *console) last() ([]string, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	lines := append([]string{}, c.lines...)
	if len(c.partial) > 0 {
		lines = append(lines, string(c.partial))
	}
	return lines, c.panicked
}
