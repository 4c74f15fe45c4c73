package layer

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/snapshot"
)

// TestDiskReset lets a disk live several lives, each with random requests and
// freezes: every one begins with what the layers have, and what was frozen in an
// earlier one keeps its content.
func TestDiskReset(t *testing.T) {
	base := filled(37*UnitSize + 512)
	m := &model{t: t, r: rand.New(rand.NewPCG(3, 4)), base: base}
	m.disk = newDisk(t, DiskConfig{Size: 64 * UnitSize, Layers: []*Layer{rawLayer(t, base)}})
	origin := make([]byte, m.disk.Size())
	copy(origin, base)
	for life := range 6 {
		m.flat, m.layers, m.states = bytes.Clone(origin), nil, nil
		for range 150 {
			m.step()
		}
		m.replay()
		if life%2 == 1 && len(m.layers) > 0 {
			// Another stack, from within this life.
			at := m.r.IntN(len(m.layers))
			stack := []*Layer{rawLayer(t, base)}
			for _, l := range m.layers[:at+1] {
				stack = append(stack, must(l.Dup())(t))
			}
			if err := m.disk.ResetTo(stack, newTop(t)); err != nil {
				t.Fatal(err)
			}
			expectDisk(t, m.disk, m.states[at])
			if got := len(m.disk.Stack()); got != at+2 {
				t.Errorf("%d layers, want %d", got, at+2)
			}
			m.flat = bytes.Clone(m.states[at])
			for range 50 {
				m.step()
			}
			if err := m.disk.ResetTo([]*Layer{rawLayer(t, base)}, newTop(t)); err != nil {
				t.Fatal(err)
			}
		} else if err := m.disk.Reset(newTop(t)); err != nil {
			t.Fatal(err)
		}
		expectDisk(t, m.disk, origin)
		if u := must(m.disk.Usage())(t); u.Layers != 1 || u.TopBlocks != 0 {
			t.Errorf("life %d begins with %+v", life, u)
		}
	}
}

// A disk that is reset again and again holds no more files than one that is not.
func TestDiskResetClosesFiles(t *testing.T) {
	d := must(NewDisk(DiskConfig{Size: 16 * UnitSize, Layers: []*Layer{rawLayer(t, filled(UnitSize))}, Top: newTop(t)}))(t)
	before := openFiles(t)
	for range 20 {
		must(d.WriteAt(filled(3*UnitSize), 0))(t)
		must(d.Freeze(newTop(t)))(t).Close()
		if err := d.Reset(newTop(t)); err != nil {
			t.Fatal(err)
		}
	}
	d.gone.Wait()
	if now := openFiles(t); now != before {
		t.Errorf("%d descriptors, before the resets %d", now, before)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
}

// What cannot be a reset changes nothing.
func TestDiskResetRefused(t *testing.T) {
	d := newDisk(t, DiskConfig{Size: 4 * UnitSize})
	content := filled(4 * UnitSize)
	must(d.WriteAt(content, 0))(t)
	if err := d.Reset(nil); !errors.Is(err, snapshot.ErrInvalid) {
		t.Errorf("without a new top: %v", err)
	}
	used := newTop(t)
	defer used.Close()
	must(used.WriteAt([]byte("x"), 0))(t)
	if err := d.Reset(used); !errors.Is(err, snapshot.ErrInvalid) {
		t.Errorf("with a top that is not empty: %v", err)
	}
	large, top := rawLayer(t, filled(8*UnitSize)), newTop(t)
	defer top.Close()
	defer large.Close()
	if err := d.ResetTo([]*Layer{large}, top); !errors.Is(err, snapshot.ErrInvalid) {
		t.Errorf("with a layer that is larger than the disk: %v", err)
	}
	expectDisk(t, d, content)

	readOnly := newDisk(t, DiskConfig{Size: 4 * UnitSize, Layers: []*Layer{rawLayer(t, content)}, ReadOnly: true})
	if err := readOnly.Reset(nil); err != nil {
		t.Error(err)
	}
	expectDisk(t, readOnly, content)

	closed := must(NewDisk(DiskConfig{Size: 4 * UnitSize, Top: newTop(t)}))(t)
	closed.Close()
	if err := closed.Reset(top); !errors.Is(err, os.ErrClosed) {
		t.Errorf("of a closed disk: %v", err)
	}
}

// An error that the host reported about lost data ends with the data.
func TestDiskResetForgetsLostData(t *testing.T) {
	d := newDisk(t, DiskConfig{Size: 4 * UnitSize})
	d.syncs.lost = unix.EIO
	if err := d.Flush(); !errors.Is(err, unix.EIO) {
		t.Fatalf("flush: %v", err)
	}
	if err := d.Reset(newTop(t)); err != nil {
		t.Fatal(err)
	}
	if err := d.Flush(); err != nil {
		t.Errorf("flush after a reset: %v", err)
	}
}
