package agent

import (
	"io"
	"io/fs"
	"os"
	"strings"
	"syscall"

	"github.com/forkvm/forkvm/agent/proto"
)

// maxSurveyed bounds the files of one survey.
const maxSurveyed = 4000

// survey says which processes and files there are.
func (s *session) survey(r proto.SurveyRequest) (proto.SurveyResult, error) {
	var result proto.SurveyResult
	if n := len(r.Files) + len(r.Contents); n > maxSurveyed {
		return result, failure(proto.CodeInvalidRequest, "%d files, at most %d are described at once", n, maxSurveyed)
	}
	if err := s.enter(); err != nil {
		return result, err
	}
	p, err := openProcfs()
	if err != nil {
		return result, err
	}
	defer p.close()
	if result.Self, err = p.process(os.Getpid()); err != nil {
		return result, failure(proto.CodeInternal, "the guest agent does not find itself: %v", err)
	}
	if r.Processes {
		if result.Processes, err = p.all(); err != nil {
			return result, err
		}
	}
	for _, path := range r.Files {
		if f, ok := p.file(path, false); ok {
			result.Files = append(result.Files, f)
		}
	}
	for _, path := range r.Contents {
		if f, ok := p.file(path, true); ok {
			result.Files = append(result.Files, f)
		}
	}
	return result, nil
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

// file describes what a path leads to. Below /proc it is the kernel's word.
func (p *procfs) file(path proto.Text, content bool) (f proto.SurveyedFile, found bool) {
	f.Path = path
	clean, err := cleanPath(path)
	if err != nil {
		return f, false
	}
	if !content {
		info, err := os.Stat(clean)
		if err == nil {
			describeFully(&f, info)
		}
		return f, err == nil
	}
	var opened *os.File
	if name, isProc := strings.CutPrefix(clean, "/proc/"); isProc {
		opened, err = p.open(name)
	} else {
		// Not waiting for the other end of a FIFO.
		opened, err = os.OpenFile(clean, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	}
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
