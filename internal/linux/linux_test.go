package linux

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestMemoryFileSeals(t *testing.T) {
	f, err := MemoryFile("test")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte("base"), 8192); err != nil {
		t.Fatal(err)
	}
	m, err := Reserve(3 * HostPageSize)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Unmap()
	if err := f.Truncate(3 * HostPageSize); err != nil {
		t.Fatal(err)
	}
	if err := m.MapFile(HostPageSize, HostPageSize, f, 8192); err != nil {
		t.Fatal(err)
	}
	if err := AddSeals(f, SealShrink|SealGrow|SealWrite|SealSeal); err != nil {
		t.Fatal("a private mapping must not stand in the way of the seal:", err)
	}
	if _, err := f.WriteAt([]byte("x"), 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("write to sealed file: %v, want EPERM", err)
	}
	m.Bytes()[HostPageSize] = 'c'
	var b [4]byte
	if _, err := f.ReadAt(b[:], 8192); err != nil || string(b[:]) != "base" {
		t.Errorf("file has %q (%v) after a write to the private mapping", b, err)
	}
	if seals, err := Seals(f); err != nil || seals&SealWrite == 0 {
		t.Errorf("seals %#x, %v", seals, err)
	}
}

func TestMappingRefusesOutside(t *testing.T) {
	m, err := Reserve(4 * HostPageSize)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range [][2]uint64{{5 * HostPageSize, 0}, {0, 5 * HostPageSize}, {^uint64(0), 2}, {HostPageSize, ^uint64(0)}} {
		if err := m.MapZero(r[0], r[1]); !errors.Is(err, unix.EINVAL) {
			t.Errorf("MapZero(%#x, %#x): %v", r[0], r[1], err)
		}
		if err := m.Advise(r[0], r[1], unix.MADV_DONTNEED); !errors.Is(err, unix.EINVAL) {
			t.Errorf("Advise(%#x, %#x): %v", r[0], r[1], err)
		}
	}
	if err := m.Unmap(); err != nil {
		t.Fatal(err)
	}
	if err := m.Unmap(); err != nil {
		t.Errorf("second Unmap: %v", err)
	}
	if err := m.MapZero(0, HostPageSize); !errors.Is(err, os.ErrClosed) {
		t.Errorf("MapZero after Unmap: %v", err)
	}
}

func TestEvent(t *testing.T) {
	e, err := NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := e.Signal(); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := e.Wait(); n != 3 || err != nil {
		t.Fatalf("Wait: %d, %v, want 3", n, err)
	}
	waited := make(chan error, 1)
	go func() {
		_, err := e.Wait()
		waited <- err
	}()
	time.Sleep(5 * time.Millisecond)
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-waited; !errors.Is(err, os.ErrClosed) {
		t.Errorf("Wait over Close: %v", err)
	}
	if err := e.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
	if err := e.Signal(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Signal after Close: %v", err)
	}
}

func TestParseStartTime(t *testing.T) {
	tail := " S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20"
	for _, c := range []struct {
		stat string
		want uint64
		bad  bool
	}{
		{stat: "7 (cat)" + tail, want: 4242},
		{stat: "7 (a) b (c)" + tail, want: 4242},
		{stat: "7 (cat", bad: true},
		{stat: "7 (cat) S 1", bad: true},
		{stat: "", bad: true},
	} {
		got, err := parseStartTime([]byte(c.stat))
		if got != c.want || (err != nil) != c.bad {
			t.Errorf("%q: %d, %v", c.stat, got, err)
		}
	}
}

func TestProcessIsNotMistaken(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	pid := cmd.Process.Pid
	start, err := StartTime(pid)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := OpenProcess(pid, start+1); !errors.Is(err, ErrProcessGone) {
		t.Errorf("same number, other start: %v", err)
	}
	p, err := OpenProcess(pid, start)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := p.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Wait on a running process: %v", err)
	}
	if err := p.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(t.Context()); err != nil {
		t.Errorf("Wait: %v", err)
	}
	// The zombie still has its stat line, but it is not that process any more.
	if _, err := OpenProcess(pid, start); !errors.Is(err, ErrProcessGone) {
		t.Errorf("OpenProcess of a zombie: %v", err)
	}
	cmd.Wait()
	if err := p.Signal(unix.SIGTERM); !errors.Is(err, ErrProcessGone) {
		t.Errorf("Signal after the end: %v", err)
	}
	if _, err := StartTime(pid); !errors.Is(err, ErrProcessGone) {
		t.Errorf("StartTime after the end: %v", err)
	}
}

func socketPair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	conns := [2]*net.UnixConn{}
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		conns[i] = c.(*net.UnixConn)
	}
	return conns[0], conns[1]
}

func TestFilesTravel(t *testing.T) {
	a, b := socketPair(t)
	f, err := MemoryFile("travel")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	f.WriteAt([]byte("hello"), 0)
	if err := SendFiles(a, []byte("two"), f, f); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 16)
	n, files, err := ReceiveFiles(b, buf, 2)
	if err != nil || string(buf[:n]) != "two" || len(files) != 2 {
		t.Fatalf("got %q, %d files, %v", buf[:n], len(files), err)
	}
	for _, g := range files {
		got := make([]byte, 5)
		if _, err := g.ReadAt(got, 0); err != nil || !bytes.Equal(got, []byte("hello")) {
			t.Errorf("received file has %q, %v", got, err)
		}
		if flags, _ := unix.FcntlInt(g.Fd(), unix.F_GETFD, 0); flags&unix.FD_CLOEXEC == 0 {
			t.Error("received file survives exec")
		}
		g.Close()
	}
	if err := SendFiles(a, []byte("x"), f, f); err != nil {
		t.Fatal(err)
	}
	if _, files, err := ReceiveFiles(b, buf, 1); err == nil || files != nil {
		t.Errorf("more files than asked for: %d, %v", len(files), err)
	}
	a.Close()
	if _, _, err := ReceiveFiles(b, buf, 1); err != io.EOF {
		t.Errorf("at the end: %v, want io.EOF", err)
	}
}

func TestUnnamedFileGetsName(t *testing.T) {
	dir := t.TempDir()
	f, err := UnnamedFile(dir, 0o600)
	if errors.Is(err, unix.EOPNOTSUPP) {
		t.Skip("file system has no unnamed files; set TMPDIR to one that does")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	f.WriteAt([]byte("content"), 0)
	path := filepath.Join(dir, "name")
	if err := LinkFile(f, path); err != nil {
		t.Fatal(err)
	}
	if err := LinkFile(f, path); !errors.Is(err, unix.EEXIST) {
		t.Errorf("link over an existing name: %v", err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "content" {
		t.Errorf("%q, %v", b, err)
	}
}

func TestHoles(t *testing.T) {
	f, err := MemoryFile("holes")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const page = HostPageSize
	f.WriteAt(make([]byte, 4*page), 2*page)
	if err := f.Truncate(8 * page); err != nil {
		t.Fatal(err)
	}
	if err := PunchHole(f, 3*page, page); err != nil {
		t.Fatal(err)
	}
	type stretch struct{ start, end int64 }
	var got []stretch
	for at := int64(0); ; {
		start, end, err := NextData(f, at)
		if err != nil {
			t.Fatal(err)
		}
		if start == end {
			break
		}
		got = append(got, stretch{start / page, end / page})
		at = end
	}
	if len(got) != 2 || got[0] != (stretch{2, 3}) || got[1] != (stretch{4, 6}) {
		t.Errorf("data at %v", got)
	}
	if err := SyncData(f); err != nil {
		t.Error(err)
	}
}
