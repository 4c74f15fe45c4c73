package agent

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/agent/proto"
)

// maxReported bounds the processes that a result names.
const maxReported = 50

// quiesce ends every process that is not to be kept.
func (s *session) quiesce(r proto.QuiesceRequest) (proto.QuiesceResult, error) {
	if r.GraceMS < 0 || r.TimeoutMS <= 0 {
		return proto.QuiesceResult{}, failure(proto.CodeInvalidRequest, "no time to end processes in")
	}
	if r.Survey != nil {
		if err := checkSurvey(*r.Survey); err != nil {
			return proto.QuiesceResult{}, err
		}
	}
	if err := s.enter(); err != nil {
		return proto.QuiesceResult{}, err
	}
	p, err := openProcfs()
	if err != nil {
		return proto.QuiesceResult{}, err
	}
	defer p.close()
	q := &quiescer{procfs: p, ctx: s.ctx, groups: s.agent.groups, self: os.Getpid(), keep: map[int]proto.KeptProcess{}, seen: map[processID]bool{}}
	for _, k := range r.Keep {
		q.keep[k.PID] = k
	}
	// The thread ends with the goroutine, and its priority with it.
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		done <- q.run(milliseconds(r.GraceMS), milliseconds(r.TimeoutMS))
	}()
	err = <-done
	if err == nil && r.Survey != nil && len(q.result.Survivors) == 0 && !q.result.Unsettled {
		var found proto.SurveyResult
		found, err = p.survey(*r.Survey)
		q.result.Survey = &found
	}
	return q.result, err
}

func milliseconds(n int64) time.Duration {
	return time.Duration(min(n, int64(24*time.Hour/time.Millisecond))) * time.Millisecond
}

type processID struct {
	pid   int
	start uint64
}

// quiescer is one quiesce.
type quiescer struct {
	*procfs
	ctx    context.Context
	groups *cgroups // nil: none
	self   int
	keep   map[int]proto.KeptProcess
	seen   map[processID]bool // what has been ended, or is going to be
	result proto.QuiesceResult
}

func (q *quiescer) run(grace, timeout time.Duration) error {
	// What starts programs stands still before those that it has started end.
	unhalted := q.halt()
	// Services notice a SIGTERM of one of their workers and go on; at a SIGKILL some
	// end all the others.
	quiet, err := q.ask(grace)
	if err != nil || quiet {
		q.result.Survivors = unhalted
		return err
	}
	hurry()
	// What is kept stands still until the others have ended, so that nothing starts
	// them anew.
	defer q.hold()()
	deadline := time.Now().Add(timeout)
	for pause := time.Millisecond; ; pause = min(2*pause, 20*time.Millisecond) {
		foreign, quiet, err := q.stopAll(deadline)
		if err != nil {
			return err
		}
		if quiet {
			q.result.Survivors = unhalted
			return nil
		}
		for _, f := range foreign {
			syscall.Kill(f.PID, syscall.SIGKILL)
		}
		if time.Now().After(deadline) || q.ctx.Err() != nil {
			q.result.Survivors = append(unhalted, foreign[:min(len(foreign), maxReported)]...)
			q.result.Unsettled = true
			return nil
		}
		time.Sleep(pause) // they need the processor in order to end
	}
}

// hurry gives this thread the processor before any ordinary program, so that
// programs cannot multiply faster than they are stopped. Where that is not allowed
// it takes longer.
func hurry() {
	_ = unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}, 0)
}

// ask asks the others to end and waits a moment for it. It reports whether none is
// left.
func (q *quiescer) ask(grace time.Duration) (quiet bool, err error) {
	asked := map[processID]bool{}
	for deadline := time.Now().Add(grace); ; time.Sleep(2 * time.Millisecond) {
		foreign, quiet, err := q.pass()
		if err != nil || quiet || !time.Now().Before(deadline) || q.ctx.Err() != nil {
			return quiet, err
		}
		for _, f := range foreign {
			if id := (processID{f.PID, f.Start}); !asked[id] {
				asked[id] = true
				syscall.Kill(f.PID, syscall.SIGTERM)
				syscall.Kill(f.PID, syscall.SIGCONT)
			}
		}
	}
}

// stopAll stops the others until none is left that could start another, and returns
// them, and whether there were none.
func (q *quiescer) stopAll(deadline time.Time) ([]proto.ProcessInfo, bool, error) {
	stopped := map[processID]bool{}
	for {
		foreign, quiet, err := q.pass()
		if err != nil || quiet {
			return nil, quiet, err
		}
		fresh := false
		for _, f := range foreign {
			if id := (processID{f.PID, f.Start}); !stopped[id] {
				stopped[id], fresh = true, true
				syscall.Kill(f.PID, syscall.SIGSTOP)
			}
		}
		if len(foreign) > 0 && !fresh || q.ctx.Err() != nil || time.Now().After(deadline) {
			return foreign, false, nil
		}
	}
}

// pass looks at every process. It lists what is not to be kept, and is quiet if there
// was nothing and nothing was started meanwhile: a process that has a child and ends,
// again and again, is seen by its traces even if it is nowhere when it is looked for.
func (q *quiescer) pass() (foreign []proto.ProcessInfo, quiet bool, err error) {
	before, err := q.forks()
	if err != nil {
		return nil, false, err
	}
	if foreign, err = q.foreign(); err != nil {
		return nil, false, err
	}
	after, err := q.forks()
	return foreign, len(foreign) == 0 && before == after, err
}

// forks is how many processes and threads have been started since boot.
func (p *procfs) forks() (string, error) {
	b, err := p.read("stat", maxKernelStat)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		if n, ok := strings.CutPrefix(line, "processes "); ok {
			return n, nil
		}
	}
	return "", errors.New("/proc/stat does not count processes")
}

// maxKernelStat is enough for a line for each of 4096 processors and interrupts.
const maxKernelStat = 4 << 20

// foreign lists what is not to be kept, the newest numbers first, and notes it.
func (q *quiescer) foreign() ([]proto.ProcessInfo, error) {
	pids, err := q.pids()
	if err != nil {
		return nil, err
	}
	var list []proto.ProcessInfo
	for _, pid := range slices.Backward(pids) {
		if pid == q.self {
			continue
		}
		info, err := q.process(pid)
		if err == errNoProcess {
			continue
		}
		if err != nil {
			return nil, err
		}
		if q.keeps(info) {
			continue
		}
		list = append(list, info)
		q.note(info)
	}
	return list, nil
}

func (q *quiescer) note(info proto.ProcessInfo) {
	id := processID{info.PID, info.Start}
	if q.seen[id] {
		return
	}
	q.seen[id] = true
	q.result.Ended++
	if len(q.result.Processes) < maxReported {
		info.Args = q.args(info.PID)
		q.result.Processes = append(q.result.Processes, info)
	}
}

func (q *quiescer) keeps(info proto.ProcessInfo) bool {
	k, ok := q.keep[info.PID]
	return ok && k.Start == info.Start && k.Program == info.Program && k.Inode == info.Inode
}

// halt stops the processes that are kept but must not run, and returns those that
// go on.
func (q *quiescer) halt() (unhalted []proto.ProcessInfo) {
	var pids []int
	for pid, k := range q.keep {
		if info, err := q.process(pid); k.Halt && pid != q.self && err == nil && q.keeps(info) {
			pids = append(pids, pid)
		}
	}
	if len(pids) == 0 {
		return nil
	}
	slices.Sort(pids)
	frozen := q.freeze(pids)
	for _, pid := range pids {
		// PID 1 takes no signal that stops it.
		if frozen || pid != 1 && syscall.Kill(pid, syscall.SIGSTOP) == nil {
			q.result.Halted++
			continue
		}
		if info, err := q.process(pid); err == nil {
			unhalted = append(unhalted, info)
		}
	}
	return unhalted
}

// hold stops the processes that are kept, and returns what lets them go on.
func (q *quiescer) hold() (release func()) {
	var held []int
	for pid, k := range q.keep {
		if k.Halt || pid == q.self || pid == 1 {
			continue
		}
		b, err := q.read(strconv.Itoa(pid)+"/stat", maxStat)
		if err != nil {
			continue
		}
		// One that was stopped already stays so.
		if s, err := parseStat(b); err == nil && s.start == k.Start && s.state != 'T' && syscall.Kill(pid, syscall.SIGSTOP) == nil {
			held = append(held, pid)
		}
	}
	return func() {
		for _, pid := range held {
			syscall.Kill(pid, syscall.SIGCONT)
		}
	}
}

// freeze moves processes into a cgroup that stands still.
func (q *quiescer) freeze(pids []int) bool {
	if q.groups == nil {
		return false
	}
	dir := filepath.Join(q.groups.dir, "halted")
	if err := os.Mkdir(dir, 0o755); err != nil && !os.IsExist(err) {
		return false
	}
	if writeFile(filepath.Join(dir, "cgroup.freeze"), "1") != nil {
		return false
	}
	for _, pid := range pids {
		if writeFile(filepath.Join(dir, "cgroup.procs"), strconv.Itoa(pid)) != nil {
			return false
		}
	}
	return true
}
