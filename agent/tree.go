package agent

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/agent/tree"
)

// getTree sends what is below a directory as a tar stream.
func (s *session) getTree(r proto.GetTreeRequest) (tree.Stats, error) {
	dir, err := s.enterAt(r.Path, directoryPath)
	if err != nil {
		return tree.Stats{}, err
	}
	if r.Exact {
		if err := checkExact(dir); err != nil {
			return tree.Stats{}, err
		}
	}
	root, err := openRoot(dir)
	if err != nil {
		return tree.Stats{}, err
	}
	defer root.Close()
	out, err := s.outflow(proto.Started{})
	if err != nil {
		return tree.Stats{}, err
	}
	stats, err := tree.Pack(out, root)
	if err != nil {
		return stats, fileError(err)
	}
	return stats, out.end()
}

// checkExact refuses links to directories.
func checkExact(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return fileError(err)
	}
	if !info.IsDir() {
		return failure(proto.CodeNotADirectory, "%q is not a directory", dir)
	}
	return nil
}

// putTree unpacks a tar stream into a directory, which it makes if it is not
// there. What had arrived before an error stays.
func (s *session) putTree(r proto.PutTreeRequest) (stats tree.Stats, err error) {
	if err := checkPutTree(r); err != nil {
		return stats, err
	}
	dir, err := s.enterAt(r.Path, directoryPath)
	if err != nil {
		return stats, err
	}
	if _, err := vacate(r.Vacate); err != nil {
		return stats, err
	}
	if r.Replace {
		if err := clearDirectory(dir, r.Spare); err != nil {
			return stats, fileError(err)
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return stats, fileError(err)
	}
	root, err := openRoot(dir)
	if err != nil {
		return stats, err
	}
	defer root.Close()
	in, err := s.inflow(putWindow)
	if err != nil {
		return stats, err
	}
	if stats, err = tree.Unpack(in, root, tree.Options{Owners: r.Owners}); err != nil {
		return stats, fileError(err)
	}
	if err := in.drain(); err != nil {
		return stats, err
	}
	if r.Sum {
		stats.Sum, err = tree.SumRoot(root)
	}
	if err != nil && !errors.Is(err, tree.ErrTooLarge) {
		return stats, fileError(err)
	}
	return stats, nil
}

func checkPutTree(r proto.PutTreeRequest) error {
	for _, pattern := range r.Spare {
		if _, err := path.Match(pattern, ""); err != nil {
			return failure(proto.CodeInvalidRequest, "pattern %.80q: %v", pattern, err)
		}
	}
	if r.Replace {
		if _, err := removablePath(r.Path); err != nil {
			return err
		}
	}
	return checkVacated(r.Vacate)
}

// clearDirectory removes what is in a directory, but for names that a pattern matches,
// or what has its path and is none.
func clearDirectory(dir string, spare []string) error {
	info, err := os.Lstat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return nil
	case err != nil:
		return err
	case !info.IsDir():
		return os.Remove(dir)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		spared := slices.ContainsFunc(spare, func(pattern string) bool {
			match, _ := path.Match(pattern, e.Name()) // the pattern was checked
			return match
		})
		if spared {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

func openRoot(dir string) (*os.Root, error) {
	info, err := os.Stat(dir)
	if err != nil {
		return nil, fileError(err)
	}
	if !info.IsDir() {
		return nil, failure(proto.CodeNotADirectory, "%q is not a directory", dir)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fileError(err)
	}
	return root, nil
}

// directoryPath accepts what cleanPath does, and a slash at the end.
func directoryPath(t proto.Text) (string, error) {
	if t == "/" {
		return "/", nil
	}
	return cleanPath(proto.Text(strings.TrimRight(string(t), "/")))
}

// removablePath accepts what directoryPath does, but not the root directory.
func removablePath(t proto.Text) (string, error) {
	path, err := directoryPath(t)
	if err == nil && filepath.Clean(path) == "/" {
		err = failure(proto.CodeInvalidRequest, "the root directory cannot be removed")
	}
	return path, err
}

// stat describes what has a name, not following a link.
func (s *session) stat(r proto.PathRequest) (proto.FileInfo, error) {
	path, err := directoryPath(r.Path)
	if err != nil {
		return proto.FileInfo{}, err
	}
	info, err := os.Lstat(path)
	if err != nil {
		return proto.FileInfo{}, fileError(err)
	}
	return describe(info), nil
}

// maxListed bounds the entries of one list result, which is one frame.
const maxListed = 2000

// list names what is in a directory, in the order of names, a part at a time.
func (s *session) list(r proto.ListRequest) (proto.ListResult, error) {
	path, err := directoryPath(r.Path)
	if err != nil {
		return proto.ListResult{}, err
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return proto.ListResult{}, fileError(err)
	}
	var result proto.ListResult
	for _, e := range entries {
		if e.Name() <= string(r.After) && r.After != "" {
			continue
		}
		if len(result.Entries) == maxListed {
			result.More = true
			break
		}
		info, err := e.Info()
		if err != nil {
			continue // it went away meanwhile
		}
		result.Entries = append(result.Entries, proto.ListEntry{Name: proto.Text(e.Name()), FileInfo: describe(info)})
	}
	return result, nil
}

// remove takes a file or, with Recursive, a tree away. What is not there is an
// error, like for rm without -f.
func (s *session) remove(r proto.RemoveRequest) (struct{}, error) {
	path, err := s.enterAt(r.Path, removablePath)
	if err != nil {
		return struct{}{}, err
	}
	if _, err = os.Lstat(path); err == nil {
		if r.Recursive {
			err = os.RemoveAll(path)
		} else {
			err = os.Remove(path)
		}
	}
	if err != nil {
		return struct{}{}, fileError(err)
	}
	return struct{}{}, nil
}

// move renames a file or directory within a file system, replacing a file.
func (s *session) move(r proto.MoveRequest) (struct{}, error) {
	from, err := cleanPath(r.From)
	if err != nil {
		return struct{}{}, err
	}
	to, err := s.enterAt(r.To, cleanPath)
	if err != nil {
		return struct{}{}, err
	}
	if err := os.Rename(from, to); err != nil {
		return struct{}{}, fileError(err)
	}
	return struct{}{}, nil
}

// kindOf is the word for a file's kind.
func kindOf(mode fs.FileMode) string {
	switch {
	case mode.IsRegular():
		return proto.KindFile
	case mode.IsDir():
		return proto.KindDirectory
	case mode&fs.ModeSymlink != 0:
		return proto.KindLink
	}
	return proto.KindOther
}
