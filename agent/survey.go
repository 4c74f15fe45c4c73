package agent

import (
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/agent/tree"
)

// maxSurveyed bounds the files of one survey.
const maxSurveyed = 4000

// survey says which processes and files there are.
func (s *session) survey(r proto.SurveyRequest) (proto.SurveyResult, error) {
	if err := checkSurvey(r); err != nil {
		return proto.SurveyResult{}, err
	}
	if err := s.enter(); err != nil {
		return proto.SurveyResult{}, err
	}
	p, err := openProcfs()
	if err != nil {
		return proto.SurveyResult{}, err
	}
	defer p.close()
	return p.survey(r)
}

func checkSurvey(r proto.SurveyRequest) error {
	n := len(r.Files) + len(r.Contents) + len(r.Exact)
	for _, search := range r.Searches {
		n += len(search.Directories) * len(search.Names)
	}
	if n > maxSurveyed {
		return failure(proto.CodeInvalidRequest, "%d files, at most %d are described at once", n, maxSurveyed)
	}
	return nil
}

// survey is a checked one.
func (p *procfs) survey(r proto.SurveyRequest) (result proto.SurveyResult, err error) {
	if result.Self, err = p.process(os.Getpid()); err != nil {
		return result, failure(proto.CodeInternal, "the guest agent does not find itself: %v", err)
	}
	if r.Processes {
		if result.Processes, err = p.all(); err != nil {
			return result, err
		}
	}
	for _, kind := range []struct {
		paths []proto.Text
		look  func(clean string) (proto.SurveyedFile, bool)
	}{{r.Files, p.described}, {r.Contents, p.contents}, {r.Exact, p.exact}} {
		for _, path := range kind.paths {
			clean, err := cleanPath(path)
			if err != nil {
				continue
			}
			if f, ok := kind.look(clean); ok {
				f.Path = path
				result.Files = append(result.Files, f)
			}
		}
	}
	for _, search := range r.Searches {
		p.search(search, &result)
	}
	if r.Tree != "" {
		result.Sum = sumTree(r.Tree)
	}
	return result, nil
}

// search looks through directories for files with certain names. Most of them are not
// there: a list of what is costs less than asking for each.
func (p *procfs) search(s proto.SurveySearch, into *proto.SurveyResult) {
	type inode struct{ device, number uint64 }
	seen := map[inode]proto.Text{}
	wanted := map[string]bool{}
	for _, name := range s.Names {
		wanted[string(name)] = true
	}
	for _, path := range s.Directories {
		clean, err := cleanPath(path)
		if err != nil {
			continue
		}
		var st unix.Stat_t
		if unix.Stat(clean, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
			continue
		}
		id := inode{st.Dev, st.Ino}
		if of, known := seen[id]; known {
			into.Repeated = append(into.Repeated, proto.RepeatedDirectory{Path: path, Of: of})
			continue
		}
		seen[id] = path
		have, err := p.names(clean)
		if err != nil {
			continue
		}
		slices.Sort(have)
		for _, name := range have {
			if !wanted[name] {
				continue
			}
			if f, ok := p.described(clean + "/" + name); ok {
				f.Path = path + "/" + proto.Text(name)
				into.Files = append(into.Files, f)
			}
		}
	}
}

// sumTree is the sum of a directory, empty if it has none.
func sumTree(path proto.Text) string {
	dir, err := directoryPath(path)
	if err != nil {
		return ""
	}
	root, err := openRoot(dir)
	if err != nil {
		return ""
	}
	defer root.Close()
	sum, err := tree.SumRoot(root)
	if err != nil {
		return ""
	}
	return sum
}

// all describes every process, the agent too.
func (p *procfs) all() ([]proto.ProcessInfo, error) {
	pids, err := p.pids()
	if err != nil {
		return nil, err
	}
	var list []proto.ProcessInfo
	for _, pid := range pids {
		info, err := p.process(pid)
		if err == errNoProcess {
			continue
		}
		if err != nil {
			return nil, err
		}
		info.Args = p.args(pid)
		list = append(list, info)
	}
	return list, nil
}

// described is what a path leads to.
func (p *procfs) described(clean string) (f proto.SurveyedFile, found bool) {
	info, err := os.Stat(clean)
	if err != nil {
		return f, false
	}
	describeFully(&f, info)
	return f, true
}

// contents is described with the beginning of a regular file. Below /proc it is the
// kernel's word.
func (p *procfs) contents(clean string) (proto.SurveyedFile, bool) {
	if name, isProc := strings.CutPrefix(clean, "/proc/"); isProc {
		return readFully(p.open(name))
	}
	// Not waiting for the other end of a FIFO.
	return readFully(os.OpenFile(clean, os.O_RDONLY|syscall.O_NONBLOCK, 0))
}

// exact is contents of what has a path itself.
func (p *procfs) exact(clean string) (f proto.SurveyedFile, found bool) {
	info, err := os.Lstat(clean)
	if err != nil {
		return f, false
	}
	if info.Mode().IsRegular() {
		return readFully(os.OpenFile(clean, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0))
	}
	describeFully(&f, info)
	return f, true
}

// readFully describes an open file and reads its beginning.
func readFully(opened *os.File, err error) (f proto.SurveyedFile, found bool) {
	if err != nil {
		return f, false
	}
	defer opened.Close()
	info, err := opened.Stat()
	if err != nil {
		return f, false
	}
	describeFully(&f, info)
	if info.Mode().IsRegular() {
		f.Content, _ = io.ReadAll(io.LimitReader(opened, proto.MaxContent))
	}
	return f, true
}

func describeFully(f *proto.SurveyedFile, info fs.FileInfo) {
	f.FileInfo = describe(info)
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		f.Inode, f.ChangedNS = st.Ino, st.Ctim.Nano()
	}
}
