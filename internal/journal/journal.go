package journal

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

const (
	fileName = "journal.jsonl"
	keptDir  = "kept"
)

// Journal is a rollout's journal, to append to. It may be used from any goroutine
// while any number of other processes append, too.
type Journal struct {
	// Now tells the time; time.Now if nil.
	Now func() time.Time

	dir     string
	rollout string

	mu   sync.Mutex
	file *os.File
	// size and head are what the journal was when this process last had its lock.
	size int64
	head Head
}

// Create makes the directory of a new rollout's journal.
func Create(dir, rollout string) (*Journal, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create journal (%s): %w", rollout, err)
	}
	return open(dir, rollout, os.O_CREATE|os.O_EXCL)
}

// Open opens the journal in a rollout's directory. The error is fs.ErrNotExist if
// there is none.
func Open(dir, rollout string) (*Journal, error) { return open(dir, rollout, 0) }

func open(dir, rollout string, flags int) (*Journal, error) {
	f, err := os.OpenFile(filepath.Join(dir, fileName), os.O_RDWR|os.O_APPEND|flags, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open journal (%s): %w", rollout, err)
	}
	return &Journal{dir: dir, rollout: rollout, file: f, head: origin(rollout)}, nil
}

// Close closes the journal's file. It is idempotent.
func (j *Journal) Close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := j.file.Close(); !errors.Is(err, fs.ErrClosed) {
		return err
	}
	return nil
}

// Append adds a line and returns it as the new head. The line is in the file, not
// necessarily on the disk: see Sync. When Append fails there is no line, unless the
// process that called it has died, too.
func (j *Journal) Append(event string, data any) (Head, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	head, err := j.append(event, data)
	if err != nil {
		return Head{}, fmt.Errorf("write journal (%s): %w", j.rollout, err)
	}
	return head, nil
}

func (j *Journal) append(event string, data any) (Head, error) {
	unlock, err := lock(j.file, unix.LOCK_EX)
	if err != nil {
		return Head{}, err
	}
	defer unlock()
	torn, err := j.catchUp()
	// Room is reserved for the lines after this one: what fills the disk, a guest's
	// writes perhaps, should be on record.
	defer j.reserve()
	if err != nil {
		return Head{}, err
	}
	var b []byte
	head, now := j.head, j.now()
	if torn > 0 {
		if b, head, err = appendLine(b, head, now, EventRecovered, Recovered{DroppedBytes: torn}); err != nil {
			return Head{}, err
		}
	}
	if b, head, err = appendLine(b, head, now, event, data); err != nil {
		return Head{}, err
	}
	// Whatever has been cut off is unfinished, and so is what cannot be written.
	if torn > 0 {
		if err := j.file.Truncate(j.size); err != nil {
			return Head{}, err
		}
	}
	if _, err := j.file.Write(b); err != nil {
		return Head{}, errors.Join(err, j.file.Truncate(j.size))
	}
	j.size, j.head = j.size+int64(len(b)), head
	return head, nil
}

func (j *Journal) now() time.Time {
	if j.Now != nil {
		return j.Now()
	}
	return time.Now()
}

// How much room is reserved behind the last line, and how little may be left of it,
// in bytes.
const (
	reserved    = 32 << 10
	minReserved = 16 << 10
)

// reserve takes room on the disk for more lines. Where there is none, or the file
// system knows no such thing, lines are written as long as they can be.
func (j *Journal) reserve() {
	var st unix.Stat_t
	if unix.Fstat(int(j.file.Fd()), &st) != nil || st.Blocks*512-st.Size >= minReserved {
		return
	}
	_ = unix.Fallocate(int(j.file.Fd()), unix.FALLOC_FL_KEEP_SIZE, st.Size, reserved)
}

// Finish gives the room back that is reserved for more lines. More may be added all
// the same.
func (j *Journal) Finish() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	unlock, err := lock(j.file, unix.LOCK_EX)
	if err != nil {
		return fmt.Errorf("finish journal (%s): %w", j.rollout, err)
	}
	defer unlock()
	info, err := j.file.Stat()
	if err == nil {
		err = j.file.Truncate(info.Size()) // frees what is allocated behind the end
	}
	if err != nil {
		return fmt.Errorf("finish journal (%s): %w", j.rollout, err)
	}
	return nil
}

// lock waits for the journal's lock. Its holders write one line and let go.
func lock(f *os.File, how int) (unlock func(), err error) {
	if err := linux.Flock(f, how); err != nil {
		return nil, err
	}
	return func() { _ = unix.Flock(int(f.Fd()), unix.LOCK_UN) }, nil
}

// catchUp finds the last line, if others have appended, and what an unfinished one
// has left behind it.
func (j *Journal) catchUp() (torn int64, err error) {
	info, err := j.file.Stat()
	if err != nil {
		return 0, err
	}
	if info.Size() == j.size {
		return 0, nil
	}
	end, last, err := lastLine(j.file, info.Size())
	if err != nil {
		return 0, err
	}
	head := origin(j.rollout)
	if len(last) > 0 {
		if head, err = headOf(last); err != nil {
			return 0, fmt.Errorf("the last line: %w", err)
		}
	}
	j.size, j.head = end, head
	return info.Size() - end, nil
}

// lastLine returns the last complete line of a file and where it ends; no line, and
// 0, if there is none.
func lastLine(f io.ReaderAt, size int64) (end int64, line []byte, err error) {
	for room := int64(4 << 10); ; room *= 4 {
		room = min(room, size)
		b := make([]byte, room)
		if _, err := f.ReadAt(b, size-room); err != nil && err != io.EOF {
			return 0, nil, err
		}
		stop := bytes.LastIndexByte(b, '\n') + 1
		start := 0
		if stop > 0 {
			start = bytes.LastIndexByte(b[:stop-1], '\n') + 1
		}
		if stop > 0 && start > 0 || room == size {
			return size - room + int64(stop), b[start:stop], nil
		}
		if room > 2*MaxLine { // an unfinished line and a whole one
			return 0, nil, fmt.Errorf("the last line: %w", ErrNotALine)
		}
	}
}

// Sync returns when all lines are on the disk.
func (j *Journal) Sync() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := j.file.Sync(); err != nil {
		return fmt.Errorf("sync journal (%s): %w", j.rollout, err)
	}
	return nil
}

// Head returns the last line that is complete; Seq is 0 if there is none.
func (j *Journal) Head() (Head, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	unlock, err := lock(j.file, unix.LOCK_SH)
	if err != nil {
		return Head{}, fmt.Errorf("read journal (%s): %w", j.rollout, err)
	}
	defer unlock()
	if _, err := j.catchUp(); err != nil {
		return Head{}, fmt.Errorf("read journal (%s): %w", j.rollout, err)
	}
	return j.head, nil
}
