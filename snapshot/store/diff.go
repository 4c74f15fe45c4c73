package store

import (
	"context"
	"fmt"

	"github.com/forkvm/forkvm/snapshot/layer"
)

// Difference says which pages and blocks two snapshots hold differently.
type Difference struct {
	Memory []layer.Range // pages of 4096 bytes
	Disks  []DiskDifference
}

// DiskDifference is Difference for the disk of a name. A disk that only one of
// the snapshots has is compared with zeros.
type DiskDifference struct {
	ID     string
	Blocks []layer.Range // of 4096 bytes
}

// Diff compares two snapshots. It reads only what is not in layers that they
// share.
func Diff(ctx context.Context, a, b *Snapshot) (*Difference, error) {
	d := new(Difference)
	var err error
	if d.Memory, err = layer.Diff(ctx, a.Memory, b.Memory); err != nil {
		return nil, fmt.Errorf("compare snapshots (%s, %s): memory: %w", a.Manifest.Name, b.Manifest.Name, err)
	}
	for _, id := range diskIDs(a, b) {
		blocks, err := layer.Diff(ctx, a.disk(id), b.disk(id))
		if err != nil {
			return nil, fmt.Errorf("compare snapshots (%s, %s): disk %s: %w", a.Manifest.Name, b.Manifest.Name, id, err)
		}
		d.Disks = append(d.Disks, DiskDifference{ID: id, Blocks: blocks})
	}
	return d, nil
}

// disk returns the layers of a disk, none if there is no such disk.
func (p *Snapshot) disk(id string) []*layer.Layer {
	for _, d := range p.Disks {
		if d.ID == id {
			return d.Layers
		}
	}
	return nil
}

func diskIDs(snapshots ...*Snapshot) []string {
	var ids []string
	seen := map[string]bool{}
	for _, p := range snapshots {
		for _, d := range p.Disks {
			if !seen[d.ID] {
				seen[d.ID] = true
				ids = append(ids, d.ID)
			}
		}
	}
	return ids
}
