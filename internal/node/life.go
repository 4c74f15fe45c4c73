package node

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/process"
)

// Life is what is known of a VM from its creation or its last reset on.
type Life struct {
	// Snapshot is what the VM began from, or was reset to.
	Snapshot string `json:"snapshot,omitempty"`
	Standing
	// Origin is where the VM stood at the beginning, and stands after a reset.
	Origin   Standing         `json:"origin"`
	Identity machine.Identity `json:"identity"`
}

// Standing says which snapshots the state of a VM grew from.
type Standing struct {
	// LastSnapshot is the snapshot that the VM last took or came from; Lineage has
	// its ID and those of the snapshots that it stands on, nearest first.
	LastSnapshot string   `json:"last_snapshot,omitempty"`
	Lineage      []string `json:"lineage,omitempty"`
}

// A life that a reset is to begin is on record before the VM's process hears of it, in a file that is named after its generation. The process notes
// only which generation its guest has confirmed, also when the program that asked for the reset has not lived to see it: so it may choose among what
// was prepared for it, and nothing else of its record is in its reach.

const lifeFiles = "life-*.json"

// lifePath is where the life of a generation is on record in a VM's directory. It returns false for what is no generation.
func lifePath(dir, generation string) (string, bool) {
	if _, err := (machine.Identity{Generation: generation}).GenerationID(); err != nil {
		return "", false
	}
	return filepath.Join(dir, "life-"+generation+".json"), true
}

// announce puts the life on record as the VM's next one. Of those before it stays only that of the generation now.
func (l *Life) announce(dir, now string) error {
	before, err := filepath.Glob(filepath.Join(dir, lifeFiles))
	if err != nil {
		return err
	}
	current, _ := lifePath(dir, now)
	for _, path := range before {
		if path != current {
			os.Remove(path)
		}
	}
	path, valid := lifePath(dir, l.Identity.Generation)
	if !valid {
		return errors.New("identity without a generation")
	}
	data, err := json.Marshal(l)
	if err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o600)
}

// addLife adds what a reset has changed, if the record does not have it.
func (r *Record) addLife(dir string) error {
	generation, err := process.ReadGeneration(dir)
	if err != nil || generation == r.Identity.Generation {
		return nil // not reset, or the process has left there what nobody knows how to read
	}
	path, valid := lifePath(dir, generation)
	if !valid {
		return nil
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // nobody has prepared it
	}
	if err != nil {
		return err
	}
	var l Life
	if err := json.Unmarshal(data, &l); err != nil {
		return err
	}
	r.Life = l
	return nil
}
