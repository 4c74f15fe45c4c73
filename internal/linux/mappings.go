package linux

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

// FreeMappings returns how many more mappings the kernel lets this process have
// (vm.max_map_count). It counts those that there are, which takes time when they
// are many.
func FreeMappings() (int, error) {
	text, err := os.ReadFile("/proc/sys/vm/max_map_count")
	if err != nil {
		return 0, fmt.Errorf("count mappings: %w", err)
	}
	limit, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, fmt.Errorf("count mappings: limit: %w", err)
	}
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		return 0, fmt.Errorf("count mappings: %w", err)
	}
	defer f.Close()
	used, buf := 0, make([]byte, 64<<10)
	for {
		n, err := f.Read(buf)
		used += bytes.Count(buf[:n], []byte{'\n'})
		if err == io.EOF {
			return limit - used, nil
		}
		if err != nil {
			return 0, fmt.Errorf("count mappings: %w", err)
		}
	}
}
