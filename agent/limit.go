package agent

import (
	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/agent/proto"
)

// limit is a proto.ResourceLimit that this kernel knows.
type limit struct {
	name     string
	resource int
	value    unix.Rlimit
}

// resources are the names of setrlimit(2).
var resources = []struct {
	name   string
	number int
}{
	{"as", unix.RLIMIT_AS}, {"core", unix.RLIMIT_CORE}, {"cpu", unix.RLIMIT_CPU}, {"data", unix.RLIMIT_DATA},
	{"fsize", unix.RLIMIT_FSIZE}, {"locks", unix.RLIMIT_LOCKS}, {"memlock", unix.RLIMIT_MEMLOCK},
	{"msgqueue", unix.RLIMIT_MSGQUEUE}, {"nice", unix.RLIMIT_NICE}, {"nofile", unix.RLIMIT_NOFILE},
	{"nproc", unix.RLIMIT_NPROC}, {"rss", unix.RLIMIT_RSS}, {"rtprio", unix.RLIMIT_RTPRIO},
	{"rttime", unix.RLIMIT_RTTIME}, {"sigpending", unix.RLIMIT_SIGPENDING}, {"stack", unix.RLIMIT_STACK},
}

func resolveLimits(list []proto.ResourceLimit) ([]limit, error) {
	var limits []limit
	for _, r := range list {
		number := -1
		for _, known := range resources {
			if known.name == r.Name {
				number = known.number
			}
		}
		l := limit{name: r.Name, resource: number, value: unix.Rlimit{Cur: uint64(r.Soft), Max: uint64(r.Hard)}}
		// -1, no limit, is the greatest of the kernel's numbers (RLIM_INFINITY).
		if number < 0 || r.Soft < proto.Unlimited || r.Hard < proto.Unlimited || l.value.Cur > l.value.Max {
			return nil, failure(proto.CodeInvalidRequest, "resource limit %.40q of %d, hard %d", r.Name, r.Soft, r.Hard)
		}
		limits = append(limits, l)
	}
	return limits, nil
}

// setLimits limits a process that does not run yet.
func setLimits(pid int, limits []limit) error {
	for _, l := range limits {
		if err := unix.Prlimit(pid, l.resource, &l.value, nil); err != nil {
			return failure(proto.CodeInvalidRequest, "set resource limit %s of %d, hard %d: %v", l.name, int64(l.value.Cur), int64(l.value.Max), err)
		}
	}
	return nil
}
