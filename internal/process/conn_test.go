package process

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
	"github.com/forkvm/forkvm/snapshot/store"
)

func pair(t *testing.T) (a, b *conn) {
	t.Helper()
	a, theirs, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	if b, err = fileConn(theirs); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

func memoryFile(t *testing.T, content string) *os.File {
	t.Helper()
	f, err := linux.MemoryFile("test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.WriteString(content); err != nil {
		t.Fatal(err)
	}
	return f
}

func content(t *testing.T, f *os.File) string {
	t.Helper()
	data, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<20))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// A message keeps its descriptors and their order, also when there are more than
// fit into one packet.
func TestMessagesCarryFiles(t *testing.T) {
	testkit.NoLeaks(t)
	a, b := pair(t)
	for _, count := range []int{0, 1, filesPerPacket, filesPerPacket + 1, 2*filesPerPacket + 50} {
		var files []*os.File
		for i := range count {
			files = append(files, memoryFile(t, fmt.Sprint("file ", i)))
		}
		sent := make(chan error, 1)
		go func() { sent <- a.send(request{Op: "test"}, files) }()
		var req request
		got, err := b.receive(&req)
		if err != nil {
			t.Fatal(err)
		}
		if err := <-sent; err != nil {
			t.Fatal(err)
		}
		if req.Op != "test" || len(got) != count {
			t.Fatalf("op %q with %d of %d files", req.Op, len(got), count)
		}
		for i, f := range got {
			if c := content(t, f); c != fmt.Sprint("file ", i) {
				t.Fatalf("file %d of %d holds %q", i, count, c)
			}
		}
		linux.CloseFiles(got...)
		linux.CloseFiles(files...)
	}
}

func TestBrokenMessages(t *testing.T) {
	testkit.NoLeaks(t)
	a, b := pair(t)
	f := memoryFile(t, "x")
	if err := a.send(strings.Repeat("x", maxMessage), nil); err == nil {
		t.Error("an oversized message was sent")
	}
	if err := linux.SendFiles(a.socket, []byte("{not json"), f); err != nil {
		t.Fatal(err)
	}
	var req request
	if files, err := b.receive(&req); err == nil || files != nil {
		t.Errorf("broken message: %v, %d files", err, len(files))
	}
	c, d := pair(t)
	if err := linux.SendFiles(c.socket, make([]byte, maxMessage+1), f); err != nil {
		t.Fatal(err)
	}
	if files, err := d.receive(&req); err == nil || files != nil {
		t.Errorf("oversized message: %v, %d files", err, len(files))
	}
	a.Close()
	if _, err := b.receive(&req); !errors.Is(err, io.EOF) {
		t.Errorf("closed peer: %v", err)
	}
}

func TestClaims(t *testing.T) {
	testkit.NoLeaks(t)
	first, second := memoryFile(t, "first"), memoryFile(t, "second")
	c := claims{files: []*os.File{first, second}}
	if c.take(-1) != nil || c.err != nil {
		t.Error("no file is not an error")
	}
	if c.take(0) != first || c.err != nil {
		t.Error("file 0 is not the first")
	}
	for _, index := range []int{0, 2, -2} {
		c.err = nil
		if c.take(index) != nil || c.err == nil {
			t.Errorf("descriptor %d was given out", index)
		}
	}
	c.close()
	if err := second.Close(); !errors.Is(err, os.ErrClosed) {
		t.Error("what nobody claimed is still open")
	}
	if _, err := first.Stat(); err != nil {
		t.Error("what was claimed is closed")
	}
}

// A checkpoint arrives as it was sent, with layers of its own.
func TestCheckpointTravels(t *testing.T) {
	testkit.NoLeaks(t)
	a, b := pair(t)
	state := &snapshot.State{}
	if err := state.Add("device/blk0", []byte("state of a disk")); err != nil {
		t.Fatal(err)
	}
	sent := &machine.Checkpoint{
		Shape: machine.Shape{CPUs: 2, MemoryBytes: 64 << 20, GuestAgent: true, Disks: []machine.DiskShape{{Name: "root", Size: 4096}}},
		State: state,
		Pause: 7 * time.Millisecond,
	}
	defer sent.Close()
	sent.Memory = append(sent.Memory, sealed(t, layer.KindMemory, 16<<10))
	raw, err := layer.OpenRawWith(memoryFile(t, strings.Repeat("r", 4096)), layer.RawOptions{Checksum: "crc32c:01234567"})
	if err != nil {
		t.Fatal(err)
	}
	sent.Disks = [][]*layer.Layer{{raw, sealed(t, layer.KindDisk, 1)}}
	set, err := linux.MemoryFile("working-set")
	if err != nil {
		t.Fatal(err)
	}
	sent.WorkingSet = &store.WorkingSet{File: set, Snapshot: strings.Repeat("ab", 16), Wanted: true}

	var out table
	form, stateFile, err := out.addCheckpoint(sent)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.send(response{Checkpoint: &form}, out.files); err != nil {
		t.Fatal(err)
	}
	stateFile.Close()
	var resp response
	files, err := b.receive(&resp)
	if err != nil {
		t.Fatal(err)
	}
	in := claims{files: files}
	got, err := in.takeCheckpoint(*resp.Checkpoint)
	if err != nil {
		t.Fatal(err)
	}
	defer got.Close()
	if data, _ := got.State.Get("device/blk0"); string(data) != "state of a disk" {
		t.Errorf("state %q", data)
	}
	if got.Shape.CPUs != 2 || got.Pause != sent.Pause || len(got.Shape.Disks) != 1 {
		t.Errorf("got %+v", got)
	}
	if got.Memory[0].ID() != sent.Memory[0].ID() || got.Disks[0][1].ID() != sent.Disks[0][1].ID() || got.Disks[0][0].ID() != raw.ID() {
		t.Error("layers are not those that were sent")
	}
	if w := got.WorkingSet; w == nil || !w.Wanted || w.Record(snapshot.WorkingSet{RAM: 1}) != nil {
		t.Errorf("working set arrived as %+v", w)
	} else if read, err := sent.WorkingSet.Read(); err != nil || read.Snapshot != sent.WorkingSet.Snapshot {
		t.Errorf("what was recorded there is %+v here, %v", read, err)
	}
	// Otherwise a snapshot would read the whole image to find it out.
	if sum := got.Disks[0][0].KnownChecksum(); sum != raw.KnownChecksum() {
		t.Errorf("the image's checksum arrived as %q", sum)
	}
}

// A VM process takes its launcher's word for a raw image; the other way the
// image is looked at.
func TestWhoIsBelieved(t *testing.T) {
	testkit.NoLeaks(t)
	form := []layerForm{{File: 0, Raw: &rawForm{ID: strings.Repeat("ab", 16)}}}
	for _, trusted := range []bool{true, false} {
		f := memoryFile(t, strings.Repeat("r", 4096))
		in := claims{files: []*os.File{f}, trusted: trusted}
		layers := in.takeLayers(form)
		if believed := in.err == nil; believed != trusted {
			t.Errorf("trusted %v: %v", trusted, in.err)
		}
		for _, l := range layers {
			l.Close()
		}
		in.close()
	}
}

// sealed makes a layer file with one unit of data.
func sealed(t *testing.T, kind layer.Kind, units uint64) *layer.Layer {
	t.Helper()
	f := memoryFile(t, strings.Repeat("\x00", 4096)+strings.Repeat("d", 4096))
	l, err := layer.Seal(f, layer.SealOptions{Kind: kind, Units: units, Extents: []layer.Extent{{Start: 0, Count: 1, Offset: 4096}}})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// What a message names and does not carry, or what is no layer, is an error and
// leaves nothing open.
func TestCheckpointOfLies(t *testing.T) {
	testkit.NoLeaks(t)
	for _, form := range []checkpointForm{
		{State: 5},
		{State: -1, Memory: []layerForm{{File: 9}}},
		{State: -1, Memory: []layerForm{{File: 0}}},                     // not a layer
		{State: -1, Disks: [][]layerForm{{{File: 0, Raw: &rawForm{}}}}}, // not whole sectors
		{State: 0},
		{State: -1, WorkingSet: &workingSetForm{File: 3}},
	} {
		f, err := linux.MemoryFile("lie")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString("no layer, no state"); err != nil {
			t.Fatal(err)
		}
		in := claims{files: []*os.File{f}}
		cp, err := in.takeCheckpoint(form)
		if err == nil {
			t.Errorf("%+v was accepted", form)
		}
		cp.Close()
		in.close()
		f.Close()
	}
}

func TestServeRefusesWhatIsNotPrepare(t *testing.T) {
	testkit.NoLeaks(t)
	launcher, theirs, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	defer launcher.Close()
	if err := launcher.send(request{Op: opKill}, nil); err != nil {
		t.Fatal(err)
	}
	if err := Serve(context.Background(), theirs, Options{}); err == nil || !strings.Contains(err.Error(), "kill") {
		t.Errorf("got %v", err)
	}
}

// A launcher does not wait between its first two messages, so what is wrong with
// the first is the answer to the second.
func TestServeAnswersABadPrepare(t *testing.T) {
	for _, second := range []string{opStart, opRehearse} {
		t.Run(second, func(t *testing.T) { answersABadPrepare(t, second) })
	}
}

func answersABadPrepare(t *testing.T, second string) {
	testkit.NoLeaks(t)
	launcher, theirs, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	defer launcher.Close()
	prepare := prepareForm{Control: 0, Vsock: -1, Directory: -1, Console: -1, KVM: -1, CPUs: 1}
	if err := launcher.send(request{Op: opPrepare, Prepare: &prepare}, []*os.File{memoryFile(t, "")}); err != nil {
		t.Fatal(err)
	}
	start := startForm{Kernel: -1, Initrd: -1, Checkpoint: &checkpointForm{State: -1}, Identity: machine.NewIdentity("x", machine.TimeHost)}
	if err := launcher.send(request{Op: second, Start: &start}, nil); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- Serve(context.Background(), theirs, Options{}) }()
	_, _, err = receive(context.Background(), launcher)
	if err == nil || !strings.Contains(err.Error(), "descriptor") {
		t.Errorf("launcher was told %v", err)
	}
	if err := <-done; err == nil {
		t.Error("the process believes that it started")
	}
}

func TestReceiveHonoursContext(t *testing.T) {
	testkit.NoLeaks(t)
	a, _ := pair(t)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if _, _, err := receive(ctx, a); !failure.Is(err, failure.Cancelled) {
		t.Errorf("got %v", err)
	}
}

func TestReceiveFromADeadProcess(t *testing.T) {
	a, b := pair(t)
	b.Close()
	if _, _, err := receive(context.Background(), a); !failure.Is(err, failure.VMProcessGone) {
		t.Errorf("got %v", err)
	}
}

func TestDirectoryConnectsBesideItsSocket(t *testing.T) {
	testkit.NoLeaks(t)
	dir := t.TempDir()
	l, err := net.Listen("unix", dir+"/"+vsockSocket+"_77")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	d := directory{file: f}
	c, err := d.connect(context.Background(), 77)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if _, err := d.connect(context.Background(), 78); err == nil {
		t.Error("connected to a port that nobody serves")
	}
}

// What the guest ran into has a code that programs can branch on, also after the
// way through JSON.
func TestDiskErrorHasACode(t *testing.T) {
	s := &server{}
	for _, c := range []struct {
		err  error
		want failure.Code
	}{
		{fmt.Errorf("write disk (blk0) at sector 8: %w", os.NewSyscallError("pwrite", unix.ENOSPC)), failure.NoSpace},
		{fmt.Errorf("flush disk (blk0) at sector 0: %w", os.NewSyscallError("fdatasync", unix.EIO)), failure.Internal},
	} {
		s.noteDiskError("root", c.err)
		text, err := json.Marshal(Status{State: Running, DiskError: s.diskError.Load()})
		if err != nil {
			t.Fatal(err)
		}
		var got Status
		if err := json.Unmarshal(text, &got); err != nil {
			t.Fatal(err)
		}
		if got.DiskError == nil || got.DiskError.Code != c.want || !strings.Contains(got.DiskError.Message, "disk root: ") {
			t.Errorf("%v became %s", c.err, text)
		}
	}
}
