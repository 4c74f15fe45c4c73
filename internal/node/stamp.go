package node

import (
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/process"
)

// recordStamp tells what is on record of a VM from what was or will be: each of its
// files is replaced by another one when it changes. The zero value is like none.
type recordStamp struct{ record, generation fileStamp }

type fileStamp struct {
	inode, size        int64
	modified, attached unix.Timespec
}

// stampOf looks at the files in a VM's directory.
func stampOf(dir string) recordStamp {
	return recordStamp{stampFile(filepath.Join(dir, recordFile)), stampFile(process.GenerationPath(dir))}
}

// stampFile is zero for a file that is not there.
func stampFile(path string) fileStamp {
	var s unix.Stat_t
	if unix.Lstat(path, &s) != nil {
		return fileStamp{}
	}
	return fileStamp{inode: int64(s.Ino), size: s.Size, modified: s.Mtim, attached: s.Ctim}
}

// current returns the record as it is on disk. It reads it only if that has changed
// since the VM last had its lock, which the caller has now.
func (vm *VM) current() (*Record, error) {
	if vm.seen != (recordStamp{}) && vm.seen == stampOf(vm.dir) {
		r := vm.Record
		return &r, nil
	}
	return readRecord(vm.dir)
}
