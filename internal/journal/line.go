package journal

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"
)

// Schema is the version of a line's form.
const Schema = "forkvm/journal/v1"

// MaxLine bounds a line, its newline included, in bytes.
const MaxLine = 8 << 20

// Line is one line of a journal.
type Line struct {
	Schema string `json:"schema"`
	// Seq numbers the lines, from 1.
	Seq uint64 `json:"seq"`
	// Prev is the Hash of the line before; of the first line, see origin.
	Prev string    `json:"prev"`
	Time time.Time `json:"time"`
	// Event says what Data is.
	Event string          `json:"event"`
	Data  json.RawMessage `json:"data"`
	// Hash is the SHA-256 of the line up to the comma before this member.
	Hash string `json:"hash"`
}

// Decode decodes the line's data.
func (l *Line) Decode(data any) error {
	if err := json.Unmarshal(l.Data, data); err != nil {
		return fmt.Errorf("read line %d (%s): %w", l.Seq, l.Event, err)
	}
	return nil
}

// Head is the last line of a journal, or of what there was of it.
type Head struct {
	Seq  uint64 `json:"seq"`
	Hash string `json:"hash"`
}

// The end of a line: the only place where the bytes of a line matter, not what
// they mean.
const (
	beforeHash = `,"hash":"`
	afterHash  = "\"}\n"
	hashLength = 2 * sha256.Size
	endLength  = len(beforeHash) + hashLength + len(afterHash)
)

// origin is what a rollout's first line has as the hash before it, so that nobody
// takes one rollout's journal for another's.
func origin(rollout string) Head { return Head{Hash: sum([]byte(rollout))} }

func sum(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

// appendLine appends the line that follows head.
func appendLine(b []byte, head Head, at time.Time, event string, data any) ([]byte, Head, error) {
	encoded, err := json.Marshal(data)
	if err != nil {
		return b, head, fmt.Errorf("encode %s: %w", event, err)
	}
	begin := len(b)
	b = append(b, lineStart...)
	b = strconv.AppendUint(b, head.Seq+1, 10)
	b = append(b, `,"prev":"`...)
	b = append(b, head.Hash...)
	b = append(b, `","time":"`...)
	b = at.UTC().AppendFormat(b, time.RFC3339Nano)
	b = append(b, `","event":"`...)
	b = append(b, event...)
	b = append(b, `","data":`...)
	b = append(b, encoded...)
	next := Head{Seq: head.Seq + 1, Hash: sum(b[begin:])}
	b = append(b, beforeHash...)
	b = append(b, next.Hash...)
	b = append(b, afterHash...)
	if size := len(b) - begin; size > MaxLine {
		return b[:begin], head, fmt.Errorf("a line of %d bytes, %d are allowed", size, MaxLine)
	}
	return b, next, nil
}

// lineStart is how appendLine begins a line.
const lineStart = `{"schema":"` + Schema + `","seq":`

// Reasons why something is not a line of a journal.
var (
	ErrNotALine = errors.New("it is no line of a journal")
	ErrChanged  = errors.New("it is not what was written: its hash is another")
	ErrChain    = errors.New("it does not follow the line before: lines were removed, added or moved")
)

// checkLine checks a line, its newline included, against its hash, which it returns.
func checkLine(b []byte) (hash string, err error) {
	if len(b) < endLength || !bytes.HasSuffix(b, []byte(afterHash)) {
		return "", ErrNotALine
	}
	body, end := b[:len(b)-endLength], b[len(b)-endLength:]
	written, found := bytes.CutPrefix(end[:len(end)-len(afterHash)], []byte(beforeHash))
	if !found {
		return "", ErrNotALine
	}
	if hash = sum(body); hash != string(written) {
		return "", ErrChanged
	}
	return hash, nil
}

// headOf is what appendLine needs of a line that it has written.
func headOf(b []byte) (Head, error) {
	hash, err := checkLine(b)
	if err != nil {
		return Head{}, err
	}
	rest, found := bytes.CutPrefix(b, []byte(lineStart))
	number, _, more := bytes.Cut(rest, []byte(","))
	seq, err := strconv.ParseUint(string(number), 10, 64)
	if !found || !more || err != nil {
		return Head{}, ErrNotALine
	}
	return Head{Seq: seq, Hash: hash}, nil
}

// parseLine reads one line, its newline included, and checks it against itself.
func parseLine(b []byte) (*Line, error) {
	if _, err := checkLine(b); err != nil {
		return nil, err
	}
	var l Line
	if err := json.Unmarshal(b, &l); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotALine, err)
	}
	if l.Schema != Schema {
		return nil, fmt.Errorf("%w: schema %q, not %q", ErrNotALine, l.Schema, Schema)
	}
	return &l, nil
}

// follows checks a line against the one before it.
func (l *Line) follows(head Head) error {
	if l.Prev != head.Hash || l.Seq != head.Seq+1 {
		return ErrChain
	}
	return nil
}
