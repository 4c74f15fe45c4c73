package cli

import (
	"bytes"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Limits of what is compared line by line.
const (
	maxTextDiff   = 256 << 10 // bytes of each side
	maxDiffMatrix = 4 << 20   // lines of one side that differ times those of the other
	diffContext   = 3
)

// isText says whether contents are text that people read.
func isText(b []byte) bool { return utf8.Valid(b) && bytes.IndexByte(b, 0) < 0 }

// edit is a line of a comparison: ' ' is in both, '-' in the first, '+' in the second.
type edit struct {
	op   byte
	line string
}

// compareLines returns the lines of both texts, in order. Where too much differs the
// lines of one stand before those of the other.
func compareLines(a, b []string) []edit {
	var edits []edit
	begin := 0
	for begin < len(a) && begin < len(b) && a[begin] == b[begin] {
		begin++
	}
	end := 0
	for end < len(a)-begin && end < len(b)-begin && a[len(a)-1-end] == b[len(b)-1-end] {
		end++
	}
	for _, line := range a[:begin] {
		edits = append(edits, edit{' ', line})
	}
	edits = append(edits, compareMiddle(a[begin:len(a)-end], b[begin:len(b)-end])...)
	for _, line := range a[len(a)-end:] {
		edits = append(edits, edit{' ', line})
	}
	return edits
}

// compareMiddle finds a longest common subsequence.
func compareMiddle(a, b []string) []edit {
	var edits []edit
	if len(a)*len(b) > maxDiffMatrix {
		for _, line := range a {
			edits = append(edits, edit{'-', line})
		}
		a = nil
	}
	// common[i][j] is how many lines a[i:] and b[j:] have in common.
	common := make([][]int32, len(a)+1)
	cells := make([]int32, (len(a)+1)*(len(b)+1))
	for i := range common {
		common[i], cells = cells[:len(b)+1], cells[len(b)+1:]
	}
	for i := len(a) - 1; i >= 0; i-- {
		for j := len(b) - 1; j >= 0; j-- {
			if a[i] == b[j] {
				common[i][j] = common[i+1][j+1] + 1
			} else {
				common[i][j] = max(common[i+1][j], common[i][j+1])
			}
		}
	}
	i, j := 0, 0
	for i < len(a) || j < len(b) {
		switch {
		case i < len(a) && j < len(b) && a[i] == b[j]:
			edits = append(edits, edit{' ', a[i]})
			i, j = i+1, j+1
		case j == len(b) || i < len(a) && common[i+1][j] >= common[i][j+1]:
			edits = append(edits, edit{'-', a[i]})
			i++
		default:
			edits = append(edits, edit{'+', b[j]})
			j++
		}
	}
	return edits
}

// unified is the difference of two texts in the form that patch(1) takes, without the
// names of files.
func unified(a, b []byte) string {
	edits := compareLines(splitLines(a), splitLines(b))
	var out strings.Builder
	for from := 0; ; {
		from = nextChange(edits, from)
		if from == len(edits) {
			return out.String()
		}
		begin, end := max(0, from-diffContext), from
		for next := from; next < len(edits) && next <= end+2*diffContext; next = nextChange(edits, next+1) {
			end = next
		}
		end = min(len(edits), end+1+diffContext)
		writeHunk(&out, edits, begin, end)
		from = end
	}
}

// splitLines keeps newlines, so that their absence at the end is a difference.
func splitLines(b []byte) []string {
	lines := strings.SplitAfter(string(b), "\n")
	if lines[len(lines)-1] == "" {
		lines = lines[:len(lines)-1]
	}
	return lines
}

func nextChange(edits []edit, from int) int {
	for from < len(edits) && edits[from].op == ' ' {
		from++
	}
	return from
}

// writeHunk writes edits[begin:end] with the numbers of their lines.
func writeHunk(out *strings.Builder, edits []edit, begin, end int) {
	var before, within [2]int
	for i, e := range edits[:end] {
		at := &before
		if i >= begin {
			at = &within
		}
		if e.op != '+' {
			at[0]++
		}
		if e.op != '-' {
			at[1]++
		}
	}
	fmt.Fprintf(out, "@@ -%s +%s @@\n", hunkRange(before[0], within[0]), hunkRange(before[1], within[1]))
	for _, e := range edits[begin:end] {
		out.WriteByte(e.op)
		out.WriteString(e.line)
		if !strings.HasSuffix(e.line, "\n") {
			out.WriteString("\n\\ No newline at end of file\n")
		}
	}
}

// hunkRange is the number of the first line and how many there are; of none, the line
// before.
func hunkRange(before, count int) string {
	if count == 0 {
		return fmt.Sprintf("%d,0", before)
	}
	return fmt.Sprintf("%d,%d", before+1, count)
}
