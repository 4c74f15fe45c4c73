package memory

import (
	"fmt"
	"io"
)

// Dump writes all of RAM, Size bytes in the order of the regions. For tests and
// debugging. Nobody may write guest memory meanwhile if the result is to be one
// moment's.
func (m *Memory) Dump(w io.Writer) error {
	const chunk = 1 << 20
	buf := make([]byte, chunk)
	for _, r := range m.regions {
		for at := uint64(0); at < r.Size; at += chunk {
			part := buf[:min(chunk, r.Size-at)]
			if err := m.ReadAt(part, r.GuestPhys+at); err != nil {
				return err
			}
			if _, err := w.Write(part); err != nil {
				return fmt.Errorf("dump memory (offset %#x): %w", r.Offset+at, err)
			}
		}
	}
	return nil
}
