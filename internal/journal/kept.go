package journal

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

// inlineLimit is how much text a line holds itself, in bytes.
const inlineLimit = 1 << 10

// Contents is what is known of bytes that went into a guest or came out of it.
type Contents struct {
	// SHA256 and Bytes are of all of it.
	SHA256 string `json:"sha256"`
	Bytes  int64  `json:"bytes"`
	// Text is what is kept, if it is short and is text. Otherwise File names the
	// file with the first KeptBytes, by their SHA-256.
	Text      string `json:"text,omitempty"`
	File      string `json:"file,omitempty"`
	KeptBytes int64  `json:"kept_bytes,omitempty"`
	// Truncated: there was more than is kept.
	Truncated bool `json:"truncated,omitempty"`
}

// Tap sees bytes go by. It is an io.Writer that does not fail.
type Tap struct {
	journal *Journal
	limit   int
	hash    hash.Hash
	bytes   int64
	kept    []byte
}

// Tap returns a tap that keeps at most so many bytes.
func (j *Journal) Tap(limit int) *Tap { return &Tap{journal: j, limit: limit, hash: sha256.New()} }

// Write implements io.Writer.
func (t *Tap) Write(p []byte) (int, error) {
	t.hash.Write(p)
	t.bytes += int64(len(p))
	t.kept = append(t.kept, p[:min(len(p), t.limit-len(t.kept))]...)
	return len(p), nil
}

// Contents stores what is kept and says what there was. When the disk is full nothing
// is kept.
func (t *Tap) Contents() (*Contents, error) {
	c := &Contents{
		SHA256: hex.EncodeToString(t.hash.Sum(nil)), Bytes: t.bytes,
		KeptBytes: int64(len(t.kept)), Truncated: t.bytes > int64(len(t.kept)),
	}
	if len(t.kept) <= inlineLimit && utf8.Valid(t.kept) {
		c.Text = string(t.kept)
		return c, nil
	}
	c.File = c.SHA256
	if c.Truncated {
		c.File = sum(t.kept)
	}
	err := t.journal.store(c.File, t.kept)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		// What there was is known all the same.
		c.File, c.KeptBytes, c.Truncated = "", 0, true
		return c, nil
	}
	return c, err
}

// store makes a kept file, complete or not at all.
func (j *Journal) store(name string, b []byte) (err error) {
	path := filepath.Join(j.dir, keptDir, name)
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("keep output (%s): %w", j.rollout, err)
		}
	}()
	if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return linux.WriteWhole(path, b)
}

// Kept returns what is kept of contents that a line of the journal in a directory
// speaks of, after a look at its hash.
func Kept(dir string, c *Contents) ([]byte, error) {
	if c.File == "" {
		return []byte(c.Text), nil
	}
	if b, err := hex.DecodeString(c.File); err != nil || len(b) != sha256.Size {
		return nil, fmt.Errorf("read kept output: %q is no name of one", c.File)
	}
	f, err := os.Open(filepath.Join(dir, keptDir, c.File))
	if err != nil {
		return nil, fmt.Errorf("read kept output: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, max(0, c.KeptBytes)+1))
	if err != nil {
		return nil, fmt.Errorf("read kept output: %w", err)
	}
	if int64(len(b)) != c.KeptBytes || sum(b) != c.File {
		return nil, fmt.Errorf("kept output %s: %w", c.File, ErrChanged)
	}
	return b, nil
}
