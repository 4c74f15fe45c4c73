package main

import (
	"strings"
	"unicode"
)

// goName joins the parts of a C name the way Go writes names.
func goName(prefix, cName string) string {
	var b strings.Builder
	b.WriteString(prefix)
	for _, part := range strings.Split(strings.ToLower(cName), "_") {
		if part == "" {
			continue
		}
		if w, ok := words[part]; ok {
			b.WriteString(w)
			continue
		}
		b.WriteString(strings.ToUpper(part[:1]) + part[1:])
	}
	return b.String()
}

// isPadding reports fields that carry nothing; they become unexported.
func isPadding(cName string) bool {
	base := strings.TrimRightFunc(cName, unicode.IsDigit)
	return base == "pad" || base == "padding" || base == "reserved"
}
