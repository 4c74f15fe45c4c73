package journal

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// DamageError says where a journal is not what was written.
type DamageError struct {
	// Line counts from 1.
	Line uint64
	Err  error
}

func (e *DamageError) Error() string {
	return fmt.Sprintf("line %d of the journal: %v", e.Line, e.Err)
}

// Unwrap returns the reason.
func (e *DamageError) Unwrap() error { return e.Err }

// Reader reads a rollout's journal and checks it: what it has returned so far is
// what was written, without a gap.
type Reader struct {
	r     *bufio.Reader
	head  Head
	torn  int64
	err   error
	bytes []byte
}

// NewReader returns a reader of the journal of a rollout.
func NewReader(r io.Reader, rollout string) *Reader {
	return &Reader{r: bufio.NewReaderSize(r, 64<<10), head: origin(rollout)}
}

// Head is the line that Next returned last. Without one, Seq is 0.
func (r *Reader) Head() Head { return r.head }

// Bytes is the line that Next returned last as it is in the file, with its newline,
// until Next is called again.
func (r *Reader) Bytes() []byte { return r.bytes }

// Torn is how many bytes of an unfinished line were at the journal's end.
func (r *Reader) Torn() int64 { return r.torn }

// Next returns the next line; io.EOF when there is none; a DamageError when what
// comes is not what was written, and the same from then on.
func (r *Reader) Next() (*Line, error) {
	if r.err != nil {
		return nil, r.err
	}
	l, err := r.next()
	if err != nil {
		r.err = err
	}
	return l, err
}

func (r *Reader) next() (*Line, error) {
	b, err := r.readLine()
	if err == io.EOF {
		r.torn = int64(len(b))
		return nil, io.EOF
	}
	if err == nil {
		var l *Line
		if l, err = parseLine(b); err == nil {
			err = l.follows(r.head)
		}
		if err == nil {
			r.head, r.bytes = Head{Seq: l.Seq, Hash: l.Hash}, b
			return l, nil
		}
	}
	if isReason(err) {
		err = &DamageError{Line: r.head.Seq + 1, Err: err}
	}
	return nil, err
}

func isReason(err error) bool {
	return errors.Is(err, ErrNotALine) || errors.Is(err, ErrChanged) || errors.Is(err, ErrChain)
}

// readLine returns the bytes up to the next newline, or with io.EOF what there is
// behind the last one.
func (r *Reader) readLine() ([]byte, error) {
	var line []byte
	for {
		part, err := r.r.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case err == nil && len(line) > MaxLine, err == bufio.ErrBufferFull && len(line) > MaxLine:
			return nil, fmt.Errorf("%w: it has more than %d bytes", ErrNotALine, MaxLine)
		case err != bufio.ErrBufferFull:
			return line, err
		}
	}
}

// File is a journal that is read as it was when it was opened.
type File struct {
	*Reader
	file *os.File
}

// OpenFile opens the journal in a rollout's directory for reading. What others are
// just writing is not an unfinished line.
func OpenFile(dir, rollout string) (*File, error) {
	f, err := os.Open(filepath.Join(dir, fileName))
	if err != nil {
		return nil, fmt.Errorf("open journal (%s): %w", rollout, err)
	}
	size, err := completeSize(f)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("open journal (%s): %w", rollout, err)
	}
	return &File{NewReader(io.LimitReader(f, size), rollout), f}, nil
}

// completeSize is the size of a journal while nobody writes.
func completeSize(f *os.File) (int64, error) {
	unlock, err := lock(f, unix.LOCK_SH)
	if err != nil {
		return 0, err
	}
	defer unlock()
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// Close closes the file.
func (f *File) Close() error { return f.file.Close() }
