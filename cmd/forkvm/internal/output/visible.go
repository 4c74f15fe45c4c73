package output

import (
	"fmt"
	"io"
	"strings"
	"unicode"
	"unicode/utf8"
)

// VisibleWriter passes text on to a terminal with everything taken out that could
// steer the terminal: control characters become visible (^[ for escape), bytes
// that are no UTF-8 and invisible characters become their numbers. Newlines and
// tabs pass, and so does a carriage return before a newline, silently.
type VisibleWriter struct {
	w    io.Writer
	rest []byte // an unfinished character, or a carriage return
}

// NewVisibleWriter returns a writer to w.
func NewVisibleWriter(w io.Writer) *VisibleWriter { return &VisibleWriter{w: w} }

// Write implements io.Writer. Characters may be split over calls.
func (v *VisibleWriter) Write(p []byte) (int, error) {
	text := append(v.rest, p...)
	var b strings.Builder
	used := appendVisible(&b, text, false)
	v.rest = append([]byte(nil), text[used:]...)
	_, err := io.WriteString(v.w, b.String())
	return len(p), err
}

// Close writes what is left of an unfinished character.
func (v *VisibleWriter) Close() error {
	var b strings.Builder
	appendVisible(&b, v.rest, true)
	v.rest = nil
	_, err := io.WriteString(v.w, b.String())
	return err
}

// Visible makes one line of text harmless: newlines become visible, too.
func Visible(text string) string {
	var b strings.Builder
	appendVisible(&b, []byte(text), true)
	return strings.NewReplacer("\n", "^J", "\t", " ").Replace(b.String())
}

// appendVisible converts text and returns how much of it was used: a character
// that may go on is left, unless there is no more to come.
func appendVisible(b *strings.Builder, text []byte, last bool) int {
	used := 0
	for used < len(text) {
		p := text[used:]
		if !last && (!utf8.FullRune(p) || len(p) == 1 && p[0] == '\r') {
			break
		}
		r, n := utf8.DecodeRune(p)
		if r == '\r' && len(p) > 1 && p[1] == '\n' {
			used++
			continue
		}
		switch {
		case r == '\n' || r == '\t':
			b.WriteRune(r)
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(b, `\x%02x`, p[0])
		case r < 0x20:
			b.WriteByte('^')
			b.WriteByte(byte(r) + '@')
		case r == 0x7f:
			b.WriteString("^?")
		case !unicode.IsGraphic(r):
			fmt.Fprintf(b, "<U+%04X>", r)
		default:
			b.WriteRune(r)
		}
		used += n
	}
	return used
}
