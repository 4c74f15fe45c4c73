package agent

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/forkvm/forkvm/agent/proto"
)

// put receives a file. Under its final name there is, at any time, either what
// was there before or the whole new file.
func (s *session) put(r proto.PutRequest) (proto.FileResult, error) {
	var result proto.FileResult
	if r.Mode > 0o7777 {
		return result, failure(proto.CodeInvalidRequest, "file mode 0%o has more than permission bits", r.Mode)
	}
	var owner *account
	if r.User != "" {
		who, err := lookupAccount(r.User)
		if err != nil {
			return result, err
		}
		owner = &who
	}
	path, err := s.enterAt(r.Path, cleanPath)
	if err != nil {
		return result, err
	}
	result.Bytes, err = s.replace(path, r.Mode, owner)
	if err != nil {
		s.agent.ids.forget(s.request.OperationID)
	}
	return result, err
}

func (s *session) replace(path string, mode uint32, owner *account) (n int64, err error) {
	if info, err := os.Lstat(path); err == nil && info.IsDir() {
		return 0, failure(proto.CodeIsADirectory, "put %q: is a directory", path)
	}
	dir := filepath.Dir(path)
	// Its own short name: the final one may be as long as names can be.
	f, err := os.CreateTemp(dir, ".forkvm-put-*")
	if err != nil {
		return 0, fileError(err)
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	if n, err = s.receiveFile(f); err != nil {
		return n, err
	}
	if owner != nil {
		if err := f.Chown(int(owner.uid), int(owner.gid)); err != nil {
			return n, fileError(err)
		}
	}
	// After chown, which takes the set-user-id bit away.
	if err := syscall.Fchmod(int(f.Fd()), mode); err != nil {
		return n, fileError(&fs.PathError{Op: "chmod", Path: path, Err: err})
	}
	if err := f.Sync(); err != nil {
		return n, fileError(err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return n, fileError(err)
	}
	return n, syncDir(dir)
}

// receiveFile writes the Stdin stream to f until its clean end.
func (s *session) receiveFile(f *os.File) (int64, error) {
	in, err := s.inflow(putWindow)
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(f, in)
	if err != nil {
		return n, fileError(err)
	}
	return n, nil
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return fileError(err)
	}
	defer d.Close()
	// Some file systems cannot; the file itself is safe.
	if err := d.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) {
		return fileError(err)
	}
	return nil
}

// get sends a regular file.
func (s *session) get(r proto.GetRequest) (proto.FileResult, error) {
	var result proto.FileResult
	path, err := s.enterAt(r.Path, cleanPath)
	if err != nil {
		return result, err
	}
	f, info, err := openRegular(path)
	if err != nil {
		return result, err
	}
	defer f.Close()
	out, err := s.outflow(proto.Started{File: &info})
	if err != nil {
		return result, err
	}
	if result.Bytes, err = io.Copy(out, f); err != nil {
		return result, fileError(err)
	}
	return result, out.end()
}

// openRegular opens a file without waiting for the other end of a FIFO and
// without waking up a device.
func openRegular(path string) (*os.File, proto.FileInfo, error) {
	info, err := os.Stat(path)
	if err == nil {
		err = regular(path, info)
	}
	if err != nil {
		return nil, proto.FileInfo{}, fileError(err)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, proto.FileInfo{}, fileError(err)
	}
	// It may be another file by now.
	if info, err = f.Stat(); err == nil {
		err = regular(path, info)
	}
	if err != nil {
		f.Close()
		return nil, proto.FileInfo{}, fileError(err)
	}
	return f, describe(info), nil
}

func regular(path string, info fs.FileInfo) error {
	switch {
	case info.IsDir():
		return failure(proto.CodeIsADirectory, "get %q: is a directory", path)
	case !info.Mode().IsRegular():
		return failure(proto.CodeNotARegularFile, "get %q: not a regular file", path)
	}
	return nil
}

func describe(info fs.FileInfo) proto.FileInfo {
	fi := proto.FileInfo{Kind: kindOf(info.Mode()), Size: info.Size(), Mode: uint32(info.Mode().Perm()), MtimeNS: info.ModTime().UnixNano()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		fi.Mode, fi.UID, fi.GID = st.Mode&0o7777, st.Uid, st.Gid
	}
	return fi
}

// enterAt begins an operation on a path that check accepts.
func (s *session) enterAt(t proto.Text, check func(proto.Text) (string, error)) (string, error) {
	path, err := check(t)
	if err != nil {
		return "", err
	}
	return path, s.enter()
}

func cleanPath(t proto.Text) (string, error) {
	path := string(t)
	switch {
	case !filepath.IsAbs(path):
		return "", failure(proto.CodeInvalidRequest, "path %.200q is not absolute", path)
	case strings.IndexByte(path, 0) >= 0:
		return "", failure(proto.CodeInvalidRequest, "path contains a NUL byte")
	case strings.HasSuffix(path, "/"):
		return "", failure(proto.CodeIsADirectory, "path %.200q names a directory", path)
	}
	return path, nil
}

// fileError gives an error of the file system a stable word.
func fileError(err error) *proto.Error {
	var typed *proto.Error
	if errors.As(err, &typed) {
		return typed
	}
	code := codeOf(err, proto.CodeIO, []errorWord{
		{syscall.ENOENT, proto.CodeFileNotFound},
		{syscall.ENOTDIR, proto.CodeNotADirectory},
		{syscall.ENOTEMPTY, proto.CodeNotEmpty},
		{syscall.EXDEV, proto.CodeOtherFileSystem},
		{syscall.EISDIR, proto.CodeIsADirectory},
		{syscall.ENAMETOOLONG, proto.CodeNameTooLong},
		{syscall.EACCES, proto.CodePermissionDenied},
		{syscall.EPERM, proto.CodePermissionDenied},
		{syscall.EROFS, proto.CodeReadOnly},
		{syscall.ENOSPC, proto.CodeNoSpace},
		{syscall.EDQUOT, proto.CodeNoSpace},
		{syscall.ENOMEM, proto.CodeResourceExhausted},
		{syscall.EMFILE, proto.CodeResourceExhausted},
		{syscall.ENFILE, proto.CodeResourceExhausted},
	})
	return &proto.Error{Code: code, Message: err.Error(), Retryable: code == proto.CodeResourceExhausted}
}

// errorWord is the stable word for an error of the kernel.
type errorWord struct {
	errno syscall.Errno
	code  string
}

// codeOf returns the first word that is for err, otherwise if none is.
func codeOf(err error, otherwise string, words []errorWord) string {
	for _, w := range words {
		if errors.Is(err, w.errno) {
			return w.code
		}
	}
	return otherwise
}
