package judge

import (
	"archive/tar"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"strings"

	"github.com/forkvm/forkvm/agent/tree"
)

// manifest is what a directory of tests holds: for each name what it is, with one of the
// modes 0755 and 0644.
type manifest map[string]tree.Entry

// maxTests bounds the entries of a directory of tests.
const maxTests = 200_000

// normal is the mode that a file of tests has in every guest, whatever umask it was
// made with on the host.
func normal(mode fs.FileMode) fs.FileMode {
	if mode.IsDir() || mode&0o111 != 0 {
		return mode.Type() | 0o755
	}
	return mode.Type() | 0o644
}

// walkTests visits what is in a directory of tests, in the order of names.
func walkTests(root *os.Root, visit func(name string, e tree.Entry, size int64, content io.Reader) error) error {
	count := 0
	return fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || name == "." {
			return err
		}
		if count++; count > maxTests {
			return fmt.Errorf("more than %d entries", maxTests)
		}
		info, err := root.Lstat(name)
		if err != nil {
			return err
		}
		e := tree.Entry{Mode: normal(info.Mode())}
		switch {
		case info.IsDir():
			return visit(name, e, 0, nil)
		case info.Mode()&fs.ModeSymlink != 0:
			e.Mode = fs.ModeSymlink
			if e.Target, err = root.Readlink(name); err != nil {
				return err
			}
			return visit(name, e, 0, nil)
		case !info.Mode().IsRegular():
			return fmt.Errorf("%s is neither a file nor a directory nor a link", name)
		}
		f, err := root.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		return visit(name, e, info.Size(), f)
	})
}

// readTests makes the manifest of a directory.
func readTests(dir string) (manifest, error) {
	m := manifest{}
	if dir == "" {
		return m, nil
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("read tests: %w", err)
	}
	defer root.Close()
	err = walkTests(root, func(name string, e tree.Entry, _ int64, content io.Reader) error {
		if content != nil {
			sum := sha256.New()
			if _, err := io.Copy(sum, content); err != nil {
				return err
			}
			e.SHA256 = [sha256.Size]byte(sum.Sum(nil))
		}
		m[name] = e
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read tests (%s): %w", dir, err)
	}
	return m, nil
}

// packTests writes a directory of tests as a tar stream.
func packTests(dir string, w io.Writer) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	archive := tar.NewWriter(w)
	err = walkTests(root, func(name string, e tree.Entry, size int64, content io.Reader) error {
		h := tar.Header{Typeflag: tar.TypeReg, Name: "./" + name, Mode: int64(e.Mode.Perm()), Size: size, Format: tar.FormatPAX}
		switch {
		case e.Mode.IsDir():
			h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
		case e.Target != "":
			h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, e.Target, 0o777
		}
		if err := archive.WriteHeader(&h); err != nil || content == nil {
			return err
		}
		_, err := io.CopyN(archive, content, size)
		return err
	})
	if err == nil {
		err = archive.Close()
	}
	return err
}

// changedError says that tests are not what they should be.
type changedError struct{ name, what string }

func (e *changedError) Error() string {
	return fmt.Sprintf("%s/%s %s", testsDir, e.name, e.what)
}

// check compares a tar stream, which a guest made of its tests, with the manifest.
// With exactly nothing may have been added.
func (m manifest) check(r io.Reader, exactly bool) error {
	left := maps.Clone(m)
	sums := map[string][sha256.Size]byte{} // of files with several names
	archive := tar.NewReader(r)
	for {
		h, err := archive.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return fmt.Errorf("read tests in guest: %w", err)
		}
		name := path.Clean(strings.TrimPrefix(h.Name, "./"))
		want, ok := left[name]
		switch {
		case name == ".":
			continue
		case !ok && exactly:
			return &changedError{name, "was added"}
		case !ok:
			continue
		}
		delete(left, name)
		got := tree.Entry{Mode: h.FileInfo().Mode()}
		switch h.Typeflag {
		case tar.TypeSymlink:
			got.Mode, got.Target = fs.ModeSymlink, h.Linkname
		case tar.TypeLink:
			// Two names of one file are two files to us.
			got.Mode, got.SHA256 = want.Mode, sums[path.Clean(h.Linkname)]
		case tar.TypeReg:
			sum := sha256.New()
			if _, err := io.Copy(sum, archive); err != nil {
				return fmt.Errorf("read tests in guest: %w", err)
			}
			got.SHA256 = [sha256.Size]byte(sum.Sum(nil))
			sums[name] = got.SHA256
		}
		if got != want {
			return &changedError{name, "was changed"}
		}
	}
	for name := range left {
		return &changedError{name, "is gone"}
	}
	return nil
}

func isChanged(err error) bool {
	var changed *changedError
	return errors.As(err, &changed)
}
