package store

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
)

// Verification reads snapshots and compares them with their checksums. A file
// that several snapshots share is read once.
type Verification struct {
	// Progress, if set, is called with the length of each layer that was read or
	// need not be.
	Progress func(bytes int64)

	sound map[fileKey]bool
}

type fileKey struct{ device, inode uint64 }

// Check reads every layer's data. What Open checks is not checked again. The
// *CorruptError names the first file that is not as it was written.
func (v *Verification) Check(ctx context.Context, p *Snapshot) error {
	if err := v.checkStack(ctx, p.Manifest.Name, p.Manifest.Memory, p.Memory); err != nil {
		return err
	}
	for i, d := range p.Disks {
		if err := v.checkStack(ctx, p.Manifest.Name, p.Manifest.Disks[i].Layers, d.Layers); err != nil {
			return err
		}
	}
	return nil
}

func (v *Verification) checkStack(ctx context.Context, name string, refs []snapshot.LayerRef, stack []*layer.Layer) error {
	for i, l := range stack {
		if err := v.checkLayer(ctx, l); err != nil {
			return fmt.Errorf("verify snapshot: %w", fileError(name, refs[i].File, err))
		}
		if v.Progress != nil {
			v.Progress(refs[i].Bytes)
		}
	}
	return nil
}

func (v *Verification) checkLayer(ctx context.Context, l *layer.Layer) error {
	key, err := keyOf(l.File())
	if err != nil || v.sound[key] {
		return err
	}
	if err := l.Verify(ctx); err != nil {
		return err
	}
	if v.sound == nil {
		v.sound = map[fileKey]bool{}
	}
	v.sound[key] = true
	return nil
}

func keyOf(f *os.File) (fileKey, error) {
	var st unix.Stat_t
	raw, err := f.SyscallConn()
	if err != nil {
		return fileKey{}, err
	}
	var statErr error
	if err := raw.Control(func(fd uintptr) { statErr = unix.Fstat(int(fd), &st) }); err != nil {
		return fileKey{}, err
	}
	return fileKey{st.Dev, st.Ino}, statErr
}

// Verify is Verification.Check for one snapshot alone.
func (p *Snapshot) Verify(ctx context.Context) error { return new(Verification).Check(ctx, p) }
