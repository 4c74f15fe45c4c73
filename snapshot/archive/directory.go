package archive

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/snapshot"
)

// ErrNotFound: the directory has no snapshot, or no chunk, of that name.
var ErrNotFound = errors.New("not found")

// Directory keeps the chunks and indices of any number of snapshots:
//
//	chunks/<2 hex digits>/<62 hex digits>   an encoded chunk
//	snapshots/<name>.json                   an index
//
// An index appears when all of its chunks are durable. Several programs may add
// to a directory at once. Methods may be called from any goroutine until Close.
type Directory struct {
	root  *os.Root
	codec *codec
}

const indexSuffix = ".json"

// MakeDirectory opens a directory, which is made if it is not there.
func MakeDirectory(path string) (*Directory, error) {
	for _, part := range []string{"chunks", "snapshots"} {
		// Guest memory is in here: nobody else's business.
		if err := os.MkdirAll(filepath.Join(path, part), 0o700); err != nil {
			return nil, fmt.Errorf("make archive (%s): %w", path, err)
		}
	}
	return OpenDirectory(path)
}

// OpenDirectory opens a directory that is there.
func OpenDirectory(path string) (*Directory, error) {
	d, err := openDirectory(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("open archive (%s): %w", path, err)
	}
	return d, nil
}

func openDirectory(path string) (*Directory, error) {
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, err
	}
	d := &Directory{root: root}
	if _, err = root.Stat("chunks"); err == nil {
		d.codec, err = newCodec()
	}
	if err != nil {
		root.Close()
		return nil, err
	}
	return d, nil
}

// Close gives the directory's descriptor back. It is idempotent.
func (d *Directory) Close() error {
	d.codec.close()
	return d.root.Close()
}

// Path is where the directory is.
func (d *Directory) Path() string { return d.root.Name() }

func chunkPath(a Address) string {
	text := a.String()
	return "chunks/" + text[:2] + "/" + text[2:]
}

// has reports whether a chunk is there; whether it is sound shows when it is read.
func (d *Directory) has(a Address) bool {
	st, err := d.root.Lstat(chunkPath(a))
	return err == nil && st.Mode().IsRegular() && st.Size() > 0
}

// put adds a chunk unless it is there, and returns the space it took.
func (d *Directory) put(a Address, data []byte) (int64, error) {
	if d.has(a) {
		return 0, nil
	}
	return d.putEncoded(a, d.codec.encode(data))
}

func (d *Directory) putEncoded(a Address, b []byte) (int64, error) {
	path := chunkPath(a)
	if err := d.root.Mkdir(path[:len("chunks/00")], 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return 0, err
	}
	return int64(len(b)), d.write(path, b)
}

// write makes a file that is complete or not there under its name.
func (d *Directory) write(path string, b []byte) error {
	temporary := path + "." + snapshot.NewID()
	err := d.root.WriteFile(temporary, b, 0o400)
	if err == nil {
		err = d.root.Rename(temporary, path)
	}
	if err != nil {
		return errors.Join(err, ignoreMissing(d.root.Remove(temporary)))
	}
	return nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// get returns a chunk's bytes. One that is not what it was is removed, so that
// another export or import brings it again.
func (d *Directory) get(a Address) ([]byte, error) {
	b, err := d.read(chunkPath(a), maxEncoded)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("chunk %s: %w", a, ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("chunk %s: %w", a, err)
	}
	data, err := d.codec.decode(a, b)
	if err != nil {
		return nil, errors.Join(err, ignoreMissing(d.root.Remove(chunkPath(a))))
	}
	return data, nil
}

// read reads a whole file of at most limit bytes.
func (d *Directory) read(path string, limit int64) ([]byte, error) {
	f, err := d.root.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("%w: more than %d bytes", snapshot.ErrTooLarge, limit)
	}
	return b, err
}

// putIndex makes everything that was put durable, and then the index of a
// snapshot, in place of one of the same name.
func (d *Directory) putIndex(x *Index) error {
	b, err := x.Encode()
	if err != nil {
		return err
	}
	if err := d.sync(); err != nil {
		return err
	}
	if err := d.write("snapshots/"+x.Name+indexSuffix, b); err != nil {
		return err
	}
	return d.sync()
}

// sync makes the file system of the directory durable: one call for thousands of
// small files.
func (d *Directory) sync() error {
	f, err := d.root.Open(".")
	if err != nil {
		return err
	}
	defer f.Close()
	return os.NewSyscallError("syncfs", unix.Syncfs(int(f.Fd())))
}

// Index returns the index of a snapshot.
func (d *Directory) Index(name string) (*Index, error) {
	if err := snapshot.CheckName(name); err != nil {
		return nil, fmt.Errorf("find archived snapshot (%.200q): %w", name, err)
	}
	b, err := d.read("snapshots/"+name+indexSuffix, MaxIndex)
	if errors.Is(err, fs.ErrNotExist) {
		err = ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("find archived snapshot (%s): %w", name, err)
	}
	return DecodeIndex(b)
}

// Names lists the snapshots of the directory, sorted.
func (d *Directory) Names() ([]string, error) {
	entries, err := fs.ReadDir(d.root.FS(), "snapshots")
	if err != nil {
		return nil, fmt.Errorf("list archive (%s): %w", d.Path(), err)
	}
	var names []string
	for _, e := range entries {
		if name, found := strings.CutSuffix(e.Name(), indexSuffix); found {
			names = append(names, name)
		}
	}
	return names, nil
}
