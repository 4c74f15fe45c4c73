package agent

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/agent/proto"
)

// usage says what the guest uses and how the agent itself is. What the kernel does
// not tell is 0.
func (a *Agent) usage() proto.UsageResult {
	r := proto.UsageResult{UptimeMS: uptime().Milliseconds(), Memory: memoryUsage(), Root: fileSystemUsage("/"), Agent: a.health()}
	r.CPUs, r.BusyMS = processorUsage()
	load, _ := os.ReadFile("/proc/loadavg")
	// proc(5): three averages, running/all tasks, the last pid.
	if f := strings.Fields(string(load)); len(f) >= 4 {
		r.Load1, _ = strconv.ParseFloat(f[0], 64)
		_, tasks, _ := strings.Cut(f[3], "/")
		r.Tasks, _ = strconv.Atoi(tasks)
	}
	return r
}

func (a *Agent) health() proto.AgentHealth {
	h := proto.AgentHealth{Version: a.cfg.Version, Protected: a.protected, Containment: proto.ContainmentProcessGroup}
	if a.groups != nil {
		h.Containment = proto.ContainmentCgroup
		_, err := os.Stat(filepath.Join(a.groups.dir, "memory.events"))
		h.MemoryController = err == nil
	}
	// proc(5): sizes in pages, the second is what is resident.
	if b, err := os.ReadFile("/proc/self/statm"); err == nil {
		if f := strings.Fields(string(b)); len(f) > 1 {
			pages, _ := strconv.ParseInt(f[1], 10, 64)
			h.ResidentBytes = pages * int64(os.Getpagesize())
		}
	}
	h.Operations = a.running()
	h.Detached = a.commands.countRunning()
	return h
}

// memoryUsage reads /proc/meminfo: "key: value kB".
func memoryUsage() proto.MemoryUsage {
	values := map[string]int64{}
	info, _ := os.ReadFile("/proc/meminfo")
	for line := range strings.Lines(string(info)) {
		if f := strings.Fields(line); len(f) > 1 {
			kib, _ := strconv.ParseInt(f[1], 10, 64)
			values[f[0]] = kib << 10
		}
	}
	return proto.MemoryUsage{
		TotalBytes: values["MemTotal:"], AvailableBytes: values["MemAvailable:"],
		SwapTotalBytes: values["SwapTotal:"], SwapFreeBytes: values["SwapFree:"],
	}
}

// userHZ is the unit of times in /proc/stat, in a second (USER_HZ).
const userHZ = 100

// processorUsage reads /proc/stat: a line for all processors and one for each, with
// the time spent in user, nice, system, idle, iowait, irq, softirq, steal and guests,
// of which the last two are in the first already.
func processorUsage() (cpus int, busyMS int64) {
	stat, _ := os.ReadFile("/proc/stat")
	for line := range strings.Lines(string(stat)) {
		f := strings.Fields(line)
		switch {
		case len(f) < 9 || !strings.HasPrefix(f[0], "cpu"):
		case f[0] != "cpu":
			cpus++
		default:
			for _, i := range []int{1, 2, 3, 6, 7} {
				ticks, _ := strconv.ParseInt(f[i], 10, 64)
				busyMS += ticks * int64(time.Second/time.Millisecond) / userHZ
			}
		}
	}
	return cpus, busyMS
}

func fileSystemUsage(path string) proto.FileSystemUsage {
	var st unix.Statfs_t
	if unix.Statfs(path, &st) != nil {
		return proto.FileSystemUsage{}
	}
	unit := int64(st.Bsize)
	return proto.FileSystemUsage{TotalBytes: int64(st.Blocks) * unit, AvailableBytes: int64(st.Bavail) * unit}
}
