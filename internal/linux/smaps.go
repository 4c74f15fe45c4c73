package linux

import (
	"fmt"
	"os"
	"strings"
)

// PrivateBytes is how much memory a process shares with nobody, from the kernel's
// summary (/proc/<pid>/smaps_rollup). 0 if the process is gone.
func PrivateBytes(pid int) int64 {
	return smapsSum(pid, "Private_Clean:", "Private_Dirty:")
}

// WrittenBytes is the part of it that the process has written. Of a process that
// runs alone it is what another one like it would not share.
func WrittenBytes(pid int) int64 { return smapsSum(pid, "Private_Dirty:") }

func smapsSum(pid int, fields ...string) int64 {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0
	}
	var total int64
	for line := range strings.Lines(string(data)) {
		var kilobytes int64
		for _, field := range fields {
			if n, _ := fmt.Sscanf(line, field+" %d kB", &kilobytes); n == 1 {
				total += kilobytes << 10
			}
		}
	}
	return total
}
