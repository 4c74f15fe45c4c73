package kernel

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"github.com/forkvm/forkvm/guest/internal/decompress"
)

const (
	arMagic      = "!<arch>\n"
	arHeaderSize = 60
	// maxPackage bounds what the files of a package may take in memory, compressed as they are in it.
	maxPackage = 2 << 30
)

// FromPackage reads a Debian package that holds a kernel, such as linux-image-6.12.117+deb12-cloud-amd64. Its modules are held in memory,
// compressed.
func FromPackage(r io.Reader) (*Kernel, error) {
	data, err := packageData(r)
	if err != nil {
		return nil, err
	}
	plain, _, err := decompress.NewReader(data)
	if err != nil {
		return nil, packageError(err)
	}
	defer plain.Close()
	contents, err := readPackage(tar.NewReader(plain))
	if err != nil {
		return nil, packageError(err)
	}
	f := files{read: func(name string) ([]byte, error) {
		content, found := contents[name]
		if !found {
			return nil, fmt.Errorf("%s: %w", name, fs.ErrNotExist)
		}
		return content, nil
	}}
	for name := range contents {
		f.paths = append(f.paths, name)
	}
	k, err := fromFiles(f)
	if format := (*FormatError)(nil); errors.As(err, &format) && format.absent {
		return nil, &FormatError{Reason: "the package holds no kernel; a package that only depends on the newest one does not"}
	}
	return k, err
}

func packageError(err error) error {
	return &FormatError{Reason: fmt.Sprintf("read Debian package: %v", err)}
}

// packageData finds the archive of the package's files. A Debian package is an ar archive of debian-binary, control.tar.* and data.tar.*.
func packageData(r io.Reader) (io.Reader, error) {
	magic := make([]byte, len(arMagic))
	if _, err := io.ReadFull(r, magic); err != nil || string(magic) != arMagic {
		return nil, &FormatError{Reason: "not a Debian package"}
	}
	for {
		header := make([]byte, arHeaderSize)
		if _, err := io.ReadFull(r, header); err != nil {
			return nil, &FormatError{Reason: "the Debian package has no data.tar"}
		}
		size, err := strconv.ParseInt(strings.TrimRight(string(header[48:58]), " "), 10, 64)
		if err != nil || size < 0 || string(header[58:]) != "`\n" {
			return nil, &FormatError{Reason: "the Debian package is damaged"}
		}
		name := strings.TrimRight(string(header[:16]), " /")
		if strings.HasPrefix(name, "data.tar") {
			return io.LimitReader(r, size), nil
		}
		if _, err := io.CopyN(io.Discard, r, size+size&1); err != nil {
			return nil, &FormatError{Reason: "the Debian package is cut short"}
		}
	}
}

// readPackage reads the files that matter into memory, by path.
func readPackage(archive *tar.Reader) (map[string][]byte, error) {
	contents, left := map[string][]byte{}, int64(maxPackage)
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return contents, nil
		}
		if err != nil {
			return nil, err
		}
		name := strings.TrimPrefix(path.Clean("/"+header.Name), "/")
		if header.Typeflag != tar.TypeReg || !wanted(name) {
			continue
		}
		content, err := decompress.ReadAll(archive, left)
		if err != nil {
			return nil, err
		}
		left -= int64(len(content))
		contents[name] = content
	}
}
