package lab

import (
	"bytes"
	"io"
	"io/fs"
	"path"

	"github.com/forkvm/forkvm/guest/initramfs"
)

// tree is the content of an initramfs besides its first program: absolute path → file. Later entries replace earlier
// ones. Directories exist by what is in them.
type tree map[string]initramfs.File

func (t tree) file(name string, perm fs.FileMode, data []byte) {
	name = path.Clean(name)
	t[name] = initramfs.File{Path: name, Mode: perm, Content: data}
}

func (t tree) link(name, target string) {
	name = path.Clean(name)
	t[name] = initramfs.File{Path: name, Target: target}
}

// writeTo writes the archive with the first program.
func (t tree) writeTo(w io.Writer, first []byte) error {
	c := initramfs.Config{
		Agent: bytes.NewReader(first),
		Size:  int64(len(first)),
		Boot:  initramfs.Boot{Mode: initramfs.ModePID1}, // not that the first program asks
	}
	for _, f := range t {
		c.Files = append(c.Files, f)
	}
	return initramfs.Write(w, c)
}
