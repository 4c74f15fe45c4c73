package judge

import (
	"cmp"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/linux"
)

// baselineFiles is a directory of surveys, each in a file that has its name of what it is
// a survey of.
type baselineFiles string

func (d baselineFiles) path(key baseline) string {
	return filepath.Join(string(d), hex.EncodeToString(key[:]))
}

func (d baselineFiles) find(key baseline) (s client.Survey, found bool) {
	b, err := os.ReadFile(d.path(key))
	return s, err == nil && json.Unmarshal(b, &s) == nil
}

// keep makes a survey's file.
func (d baselineFiles) keep(key baseline, s client.Survey) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(string(d), 0o700); err != nil {
		return err
	}
	if err := d.makeRoom(); err != nil {
		return err
	}
	return linux.WriteWhole(d.path(key), b)
}

// makeRoom removes the oldest files until there is room for one more, those that somebody
// could not finish among them.
func (d baselineFiles) makeRoom() error {
	entries, err := os.ReadDir(string(d))
	if err != nil || len(entries) < maxBaselines {
		return err
	}
	age := map[string]time.Time{}
	for _, e := range entries {
		if info, err := e.Info(); err == nil { // not removed meanwhile
			age[e.Name()] = info.ModTime()
		}
	}
	slices.SortFunc(entries, func(a, b os.DirEntry) int {
		return cmp.Or(age[a.Name()].Compare(age[b.Name()]), cmp.Compare(a.Name(), b.Name()))
	})
	for _, e := range entries[:len(entries)-maxBaselines+1] {
		if err := os.Remove(filepath.Join(string(d), e.Name())); err != nil && !os.IsNotExist(err) {
			return err
		}
	}
	return nil
}
