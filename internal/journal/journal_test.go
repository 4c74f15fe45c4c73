package journal

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/agent/proto"
)

const rollout = "0123456789ab"

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)

// appender, in the environment, makes this program append so many lines.
const appender = "FORKVM_TEST_APPEND"

func TestMain(m *testing.M) {
	if dir := os.Getenv(appender); dir != "" {
		os.Exit(appendLines(dir))
	}
	os.Exit(m.Run())
}

const linesEach = 100

func appendLines(dir string) int {
	j, err := Open(dir, rollout)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	var all sync.WaitGroup
	failed := make(chan error, 2)
	for range 2 {
		all.Go(func() {
			for i := range linesEach / 2 {
				if _, err := j.Append("exec", Operation{ID: fmt.Sprint(os.Getpid(), "-", i)}); err != nil {
					failed <- err
					return
				}
			}
		})
	}
	all.Wait()
	close(failed)
	if err := <-failed; err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func create(t *testing.T) *Journal {
	t.Helper()
	j, err := Create(filepath.Join(t.TempDir(), rollout), rollout)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	return j
}

func add(t *testing.T, j *Journal, event string, data any) Head {
	t.Helper()
	head, err := j.Append(event, data)
	if err != nil {
		t.Fatal(err)
	}
	return head
}

// readAll returns the lines before the first damage, and the reader after it.
func readAll(b []byte) ([]*Line, *Reader, error) {
	r := NewReader(bytes.NewReader(b), rollout)
	var lines []*Line
	for {
		l, err := r.Next()
		if err == io.EOF {
			return lines, r, nil
		}
		if err != nil {
			return lines, r, err
		}
		lines = append(lines, l)
	}
}

func contents(t *testing.T, j *Journal) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(j.dir, fileName))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestLinesComeBack(t *testing.T) {
	j := create(t)
	add(t, j, EventCreated, Created{VM: rollout, Name: "a <b> \u2028", Image: "debian"})
	add(t, j, "exec", Operation{Args: []proto.Text{"echo", "\xff"}})
	head := add(t, j, EventDone, Done{Of: 2, Result: &Result{ExitCode: 3}})
	lines, r, err := readAll(contents(t, j))
	if err != nil || len(lines) != 3 || r.Head() != head || r.Torn() != 0 {
		t.Fatalf("%d lines, head %+v, want %+v: %v", len(lines), r.Head(), head, err)
	}
	var op Operation
	if err := lines[1].Decode(&op); err != nil || op.Args[1] != "\xff" || lines[1].Event != "exec" || lines[1].Seq != 2 {
		t.Errorf("got %+v of %+v: %v", op, lines[1], err)
	}
	if err := lines[2].Decode(new([]int)); err == nil {
		t.Error("an object is decoded as a list")
	}
}

// Several processes, each with several goroutines, append at once.
func TestManyAppendAtOnce(t *testing.T) {
	j := create(t)
	const processes = 4
	var started []*exec.Cmd
	for range processes {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), appender+"="+j.dir)
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		started = append(started, cmd)
	}
	for range linesEach {
		add(t, j, EventPaused, struct{}{})
	}
	for _, cmd := range started {
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	}
	lines, _, err := readAll(contents(t, j))
	if err != nil || len(lines) != (processes+1)*linesEach {
		t.Fatalf("%d lines: %v", len(lines), err)
	}
}

// Whatever is done to the lines in the middle or to their order is found, at the
// place where it was done.
func TestTamperingIsFound(t *testing.T) {
	j := create(t)
	for i := range 6 {
		add(t, j, "exec", Operation{ID: fmt.Sprint(i)})
	}
	whole := contents(t, j)
	other, err := Create(filepath.Join(t.TempDir(), "other"), "other")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	for i := range 6 {
		add(t, other, "exec", Operation{ID: fmt.Sprint(i)})
	}
	lines := func() [][]byte { return bytes.SplitAfter(bytes.Clone(whole), []byte("\n"))[:6] }
	for _, c := range []struct {
		name   string
		change func(l [][]byte) [][]byte
		line   uint64
		reason error
	}{
		{"a byte", func(l [][]byte) [][]byte {
			l[2] = bytes.Replace(l[2], []byte(`"id":"2"`), []byte(`"id":"7"`), 1)
			return l
		}, 3, ErrChanged},
		{"a hash", func(l [][]byte) [][]byte {
			l[2][len(l[2])-5] ^= 1
			return l
		}, 3, ErrChanged},
		{"a byte, with the line's hash made anew", func(l [][]byte) [][]byte {
			body := bytes.Replace(l[2][:len(l[2])-endLength], []byte(`"id":"2"`), []byte(`"id":"7"`), 1)
			l[2] = fmt.Appendf(nil, "%s%s%s%s", body, beforeHash, sum(body), afterHash)
			return l
		}, 4, ErrChain},
		{"a line removed", func(l [][]byte) [][]byte { return append(l[:3], l[4:]...) }, 4, ErrChain},
		{"the first line removed", func(l [][]byte) [][]byte { return l[1:] }, 1, ErrChain},
		{"a line twice", func(l [][]byte) [][]byte { return append(l[:3], append([][]byte{l[2]}, l[3:]...)...) }, 4, ErrChain},
		{"two lines exchanged", func(l [][]byte) [][]byte { l[1], l[2] = l[2], l[1]; return l }, 2, ErrChain},
		{"an empty line", func(l [][]byte) [][]byte { return append(l[:1], append([][]byte{[]byte("\n")}, l[1:]...)...) }, 2, ErrNotALine},
		{"no JSON", func(l [][]byte) [][]byte {
			body := []byte("x")
			l[0] = fmt.Appendf(nil, "%s%s%s%s", body, beforeHash, sum(body), afterHash)
			return l
		}, 1, ErrNotALine},
		{"another rollout's", func([][]byte) [][]byte { return [][]byte{contents(t, other)} }, 1, ErrChain},
	} {
		t.Run(c.name, func(t *testing.T) {
			good, _, err := readAll(bytes.Join(c.change(lines()), nil))
			var damage *DamageError
			if !errors.As(err, &damage) || damage.Line != c.line || !errors.Is(err, c.reason) || len(good) != int(c.line)-1 {
				t.Errorf("after %d good lines: %v; want %v at line %d", len(good), err, c.reason, c.line)
			}
		})
	}
	// The end is the one thing that only a head that was kept elsewhere shows.
	if _, r, err := readAll(bytes.Join(lines()[:4], nil)); err != nil || r.Head().Seq != 4 {
		t.Errorf("a shorter journal: %v, head %+v", err, r.Head())
	}
}

func TestUnfinishedLine(t *testing.T) {
	for _, left := range []string{`{"schema":"forkvm/jour`, strings.Repeat("\x00", 4096), strings.Repeat("x", 100<<10)} {
		j := create(t)
		add(t, j, EventCreated, Created{VM: rollout})
		add(t, j, EventPaused, struct{}{})
		f, err := os.OpenFile(filepath.Join(j.dir, fileName), os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		io.WriteString(f, left)
		if lines, r, err := readAll(contents(t, j)); err != nil || len(lines) != 2 || r.Torn() != int64(len(left)) {
			t.Errorf("%.10q: %d lines, %d torn bytes, %v", left, len(lines), r.Torn(), err)
		}
		again, err := Open(j.dir, rollout)
		if err != nil {
			t.Fatal(err)
		}
		defer again.Close()
		add(t, again, EventResumed, struct{}{})
		add(t, j, EventPaused, struct{}{})
		lines, r, err := readAll(contents(t, j))
		if err != nil || len(lines) != 5 || r.Torn() != 0 {
			t.Fatalf("%.10q: %d lines, %d torn bytes, %v", left, len(lines), r.Torn(), err)
		}
		var what Recovered
		if err := lines[2].Decode(&what); err != nil || lines[2].Event != EventRecovered || what.DroppedBytes != int64(len(left)) {
			t.Errorf("%s %s: %v", lines[2].Event, lines[2].Data, err)
		}
	}
}

// A journal with nothing but an unfinished first line begins anew.
func TestUnfinishedFirstLine(t *testing.T) {
	j := create(t)
	if err := os.WriteFile(filepath.Join(j.dir, fileName), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	add(t, j, EventCreated, Created{})
	if lines, _, err := readAll(contents(t, j)); err != nil || len(lines) != 2 || lines[0].Event != EventRecovered {
		t.Errorf("%d lines: %v", len(lines), err)
	}
}

// A line that does not fit on the disk is none, and the next one that does is.
func TestNoSpaceForALine(t *testing.T) {
	j := create(t)
	add(t, j, EventCreated, Created{VM: rollout})
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	// A limit on the size of files cuts a write in the middle, as a full disk does.
	limit := unix.Rlimit{Cur: uint64(len(contents(t, j)) + 100), Max: old.Max}
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &limit); err != nil {
		t.Fatal(err)
	}
	_, err := j.Append(EventPaused, struct{}{})
	if restored := unix.Setrlimit(unix.RLIMIT_FSIZE, &old); restored != nil {
		t.Fatal(restored)
	}
	if !errors.Is(err, unix.EFBIG) {
		t.Errorf("append: %v", err)
	}
	add(t, j, EventResumed, struct{}{})
	lines, r, err := readAll(contents(t, j))
	if err != nil || len(lines) != 2 || r.Torn() != 0 || lines[1].Event != EventResumed {
		t.Errorf("%d lines, %d torn bytes: %v", len(lines), r.Torn(), err)
	}
}

// There is room for some lines when nothing else fits on the disk, until the journal
// is finished.
func TestReservedRoom(t *testing.T) {
	j := create(t)
	blocks := func() int64 {
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(j.dir, fileName), &st); err != nil {
			t.Fatal(err)
		}
		return st.Blocks * 512
	}
	for range 200 {
		before := blocks()
		size := len(contents(t, j))
		if size > 0 && before-int64(size) < minReserved {
			t.Skipf("this file system reserves no room: %d bytes, %d on disk", size, before)
		}
		add(t, j, "exec", Operation{ID: strings.Repeat("x", 300)})
	}
	if err := j.Finish(); err != nil {
		t.Fatal(err)
	}
	// The file system has something to note of the file, too.
	if size := int64(len(contents(t, j))); blocks() >= size+minReserved {
		t.Errorf("%d bytes take %d", size, blocks())
	}
	add(t, j, EventVerdict, Verdict{})
	if lines, _, err := readAll(contents(t, j)); err != nil || len(lines) != 201 {
		t.Errorf("%d lines: %v", len(lines), err)
	}
}

// Nobody goes on with a journal whose end is damaged.
func TestDamagedEndIsNotContinued(t *testing.T) {
	j := create(t)
	add(t, j, EventCreated, Created{VM: rollout})
	b := contents(t, j)
	b[20] ^= 1
	if err := os.WriteFile(filepath.Join(j.dir, fileName), b, 0o600); err != nil {
		t.Fatal(err)
	}
	again, err := Open(j.dir, rollout)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if _, err := again.Append(EventPaused, struct{}{}); !errors.Is(err, ErrChanged) {
		t.Errorf("append: %v", err)
	}
}

func TestNoJournal(t *testing.T) {
	if _, err := Open(t.TempDir(), rollout); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("open: %v", err)
	}
	j := create(t)
	if _, err := Create(j.dir, rollout); !errors.Is(err, fs.ErrExist) {
		t.Errorf("create again: %v", err)
	}
}

func TestTooLongALine(t *testing.T) {
	j := create(t)
	if _, err := j.Append("exec", strings.Repeat("x", MaxLine)); err == nil {
		t.Error("appended")
	}
	add(t, j, "exec", strings.Repeat("x", MaxLine-1000))
	add(t, j, EventPaused, struct{}{})
	if lines, _, err := readAll(contents(t, j)); err != nil || len(lines) != 2 {
		t.Errorf("%d lines: %v", len(lines), err)
	}
}

func TestKeptContents(t *testing.T) {
	j := create(t)
	for _, c := range []struct {
		data      string
		limit     int
		inline    bool
		truncated bool
	}{
		{"", 10, true, false},
		{"3 passed\n", 100, true, false},
		{"3 passed\n", 4, true, true},
		{"\xff", 100, false, false},
		{strings.Repeat("x", 5000), 10_000, false, false},
		{strings.Repeat("x", 5000), 3000, false, true},
	} {
		tap := j.Tap(c.limit)
		for _, b := range []byte(c.data) {
			tap.Write([]byte{b})
		}
		got, err := tap.Contents()
		if err != nil {
			t.Fatal(err)
		}
		kept, err := Kept(j.dir, got)
		want := c.data[:min(len(c.data), c.limit)]
		if err != nil || string(kept) != want || (got.File == "") != c.inline || got.Truncated != c.truncated || got.SHA256 != sum([]byte(c.data)) {
			t.Errorf("%.10q cut at %d: %+v, %d bytes kept, %v", c.data, c.limit, got, len(kept), err)
		}
		if got.File == "" {
			continue
		}
		if err := os.WriteFile(filepath.Join(j.dir, keptDir, got.File), []byte("other"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Kept(j.dir, got); !errors.Is(err, ErrChanged) {
			t.Errorf("changed contents: %v", err)
		}
	}
	if _, err := Kept(j.dir, &Contents{File: "../journal.jsonl"}); err == nil {
		t.Error("a file outside was read")
	}
}

func FuzzReader(f *testing.F) {
	line, head, err := appendLine(nil, origin(rollout), epoch, EventCreated, Created{VM: rollout})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(line)
	two, _, err := appendLine(line, head, epoch, EventPaused, struct{}{})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(two)
	f.Add(two[:len(two)-1])
	f.Add([]byte("\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		lines, r, err := readAll(b)
		if r.Head().Seq != uint64(len(lines)) {
			t.Fatalf("%d lines, head %d", len(lines), r.Head().Seq)
		}
		if err == nil {
			end, last, err := lastLine(bytes.NewReader(b), int64(len(b)))
			if err != nil || int64(len(b))-end != r.Torn() || (len(last) > 0) != (len(lines) > 0) {
				t.Fatalf("last line %q ends at %d of %d, torn %d: %v", last, end, len(b), r.Torn(), err)
			}
		}
		for _, l := range lines {
			_ = l.Decode(new(Done))
			_ = l.Decode(new(Operation))
		}
	})
}

func BenchmarkAppend(b *testing.B) {
	dir := b.TempDir()
	created, err := Create(dir, rollout)
	if err != nil {
		b.Fatal(err)
	}
	created.Close()
	op := Operation{Args: []proto.Text{"sh", "-c", "make test"}}
	done := Done{Of: 2, Result: &Result{ExitCode: 2, DurationMS: 40}, Stdout: &Contents{SHA256: sum(nil), Bytes: 9, Text: "3 passed\n"}}
	for b.Loop() {
		// As an operation of the guest agent does it.
		j, err := Open(dir, rollout)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := j.Append("exec", op); err != nil {
			b.Fatal(err)
		}
		if _, err := j.Append(EventDone, done); err != nil {
			b.Fatal(err)
		}
		if err := j.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
