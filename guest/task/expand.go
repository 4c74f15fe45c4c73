package task

import (
	"fmt"
	"strings"
)

// Expand replaces ${NAME} and ${NAME:-default} in a value by what lookup returns. A
// name without a value and without a default is an error. A $ that is not followed by
// { stands for itself.
func Expand(value string, lookup func(name string) (string, bool)) (string, error) {
	var b strings.Builder
	for {
		before, rest, found := strings.Cut(value, "${")
		b.WriteString(before)
		if !found {
			return b.String(), nil
		}
		reference, after, closed := strings.Cut(rest, "}")
		if !closed {
			return "", fmt.Errorf("%.80q has no }", "${"+rest)
		}
		name, otherwise, hasDefault := strings.Cut(reference, ":-")
		if !isName(name) {
			return "", fmt.Errorf("%.80q is no name of a variable", name)
		}
		text, set := lookup(name)
		switch {
		case set && (text != "" || !hasDefault):
		case hasDefault:
			text = otherwise
		default:
			return "", fmt.Errorf("%s is not set in the host's environment", name)
		}
		b.WriteString(text)
		value = after
	}
}

func isName(s string) bool {
	for i, c := range s {
		letter := c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return s != ""
}
