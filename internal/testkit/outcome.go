package testkit

import "strings"

// OutcomeCell is how the documents' tables of attacks show an outcome such as "scored 0" or "tampering (reason)". An attack that
// scores 1 has got what it was after.
func OutcomeCell(summary string) string {
	switch outcome, rest, _ := strings.Cut(summary, " "); {
	case summary == "scored 1":
		return "**1: not stopped**"
	case outcome == "scored":
		return rest
	default:
		return "`" + outcome + "`"
	}
}
