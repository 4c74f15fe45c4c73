package platform

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// ConsoleSize is how many bytes of output a Console keeps.
const ConsoleSize = 64 << 10

// Console keeps the newest ConsoleSize bytes that a guest printed. Its methods may be called at any time, also after the
// device is closed.
type Console struct {
	mu    sync.Mutex
	ring  []byte // grows up to ConsoleSize, then position total%ConsoleSize is the oldest byte
	total uint64
}

func (c *Console) put(value byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.ring) < ConsoleSize {
		c.ring = append(c.ring, value)
	} else {
		c.ring[c.total%ConsoleSize] = value
	}
	c.total++
}

func (c *Console) clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ring, c.total = nil, 0
}

// Total returns how many bytes the guest printed so far.
func (c *Console) Total() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.total
}

// Bytes returns a copy of what is kept, unchanged: it may hold anything, escape sequences for a terminal included.
func (c *Console) Bytes() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.ring) < ConsoleSize {
		return bytes.Clone(c.ring)
	}
	oldest := c.total % ConsoleSize
	return append(bytes.Clone(c.ring[oldest:]), c.ring[:oldest]...)
}

// LastLines returns the last n lines, made safe to show by Printable. An unfinished last line counts.
func (c *Console) LastLines(n int) []string {
	text := bytes.TrimRight(c.Bytes(), "\r\n")
	if n <= 0 || len(text) == 0 {
		return nil
	}
	lines := bytes.Split(text, []byte("\n"))
	lines = lines[max(0, len(lines)-n):]
	shown := make([]string, len(lines))
	for i, line := range lines {
		shown[i] = Printable(bytes.TrimRight(line, "\r"))
	}
	return shown
}

// Printable returns guest output as text that cannot act on the terminal that shows it. Line feeds, tabs and printable
// characters stay, a carriage return before a line feed goes; everything else (escape sequences, other control characters,
// direction overrides, bytes that are no UTF-8) is written out, as \x1b or \u202e.
func Printable(p []byte) string {
	var text strings.Builder
	text.Grow(len(p))
	for len(p) > 0 {
		r, size := utf8.DecodeRune(p)
		switch {
		case r == utf8.RuneError && size == 1, r < utf8.RuneSelf && r != '\n' && r != '\t' && r != '\r' && !unicode.IsPrint(r):
			fmt.Fprintf(&text, `\x%02x`, p[0])
		case r == '\r' && len(p) > 1 && p[1] == '\n':
		case r == '\r':
			text.WriteString(`\x0d`)
		case r == '\n', r == '\t', unicode.IsPrint(r):
			text.WriteRune(r)
		case r > 0xffff:
			fmt.Fprintf(&text, `\U%08x`, r)
		default:
			fmt.Fprintf(&text, `\u%04x`, r)
		}
		p = p[size:]
	}
	return text.String()
}
