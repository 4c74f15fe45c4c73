package linux

import (
	"fmt"
	"os"
	"strings"
)

// PrivateBytes is how much memory a process shares with nobody, from the kernel's
// summary (/proc/<pid>/smaps_rollup). 0 if the process is gone.
func PrivateBytes(pid int) int64 {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0
	}
	var total int64
	for line := range strings.Lines(string(data)) {
		var kilobytes int64
		for _, field := range []string{"Private_Clean:", "Private_Dirty:"} {
			if n, _ := fmt.Sscanf(line, field+" %d kB", &kilobytes); n == 1 {
				total += kilobytes << 10
			}
		}
	}
	return total
}
