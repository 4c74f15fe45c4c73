package platform

import (
	"fmt"
	"io"
	"os"
	"sync"
)

// LogFile is a console log of bounded size in one file, for SerialConfig.Output. It needs only an open descriptor, so it
// works in a process that cannot open anything: there is no second file to rotate into.
type LogFile struct {
	file  *os.File
	limit int64

	mu   sync.Mutex
	size int64
}

// NewLogFile continues the log in f, which must be open for reading and writing and not in append mode. The file never
// grows past limit bytes: when it would, the newest half is moved to the front and the rest dropped. The caller keeps f
// and closes it.
func NewLogFile(f *os.File, limit int64) (*LogFile, error) {
	if limit < 2 {
		return nil, fmt.Errorf("open console log (%s): limit of %d bytes", f.Name(), limit)
	}
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("open console log: %w", err)
	}
	return &LogFile{file: f, limit: limit, size: info.Size()}, nil
}

// Write appends p.
func (l *LogFile) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	skipped := 0
	if excess := int64(len(p)) - l.limit; excess > 0 {
		skipped = int(excess)
	}
	if l.size+int64(len(p)-skipped) > l.limit {
		if err := l.shrinkLocked(int64(len(p) - skipped)); err != nil {
			return 0, fmt.Errorf("shorten console log (%s): %w", l.file.Name(), err)
		}
	}
	n, err := l.file.WriteAt(p[skipped:], l.size)
	l.size += int64(n)
	return skipped + n, err
}

// shrinkLocked keeps as much of the end as leaves room for the coming bytes, at most half of the limit.
func (l *LogFile) shrinkLocked(coming int64) error {
	keep := min(l.limit/2, l.limit-coming, l.size)
	kept := make([]byte, keep)
	if _, err := l.file.ReadAt(kept, l.size-keep); err != nil && err != io.EOF {
		return err
	}
	if _, err := l.file.WriteAt(kept, 0); err != nil {
		return err
	}
	if err := l.file.Truncate(keep); err != nil {
		return err
	}
	l.size = keep
	return nil
}
