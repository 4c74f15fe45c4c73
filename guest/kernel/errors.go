package kernel

import (
	"fmt"
	"strings"
)

// FormatError says that something is no kernel, or none of a kind that can be used.
type FormatError struct {
	Reason string

	absent bool // there is no kernel at all
}

func (e *FormatError) Error() string { return "not a usable kernel: " + e.Reason }

// MissingError says that a kernel lacks something that a guest cannot do without, and what option of its configuration would bring it.
type MissingError struct {
	Release string
	Missing []Missing
}

// Missing is one thing that a kernel lacks.
type Missing struct {
	Name   string // module, or "PVH entry"
	Option string // configuration option that brings it; empty if not known
	Needed string // module that depends on it; empty if the guest itself does
}

func (e *MissingError) Error() string {
	var parts []string
	for _, m := range e.Missing {
		part := m.Name
		if m.Option != "" {
			part += " (" + m.Option + ")"
		}
		if m.Needed != "" {
			part += ", needed by " + m.Needed
		}
		parts = append(parts, part)
	}
	name := "kernel"
	if e.Release != "" {
		name += " " + e.Release
	}
	return fmt.Sprintf("%s lacks %s", name, strings.Join(parts, "; "))
}
