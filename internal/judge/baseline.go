package judge

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/forkvm/forkvm/agent/client"
)

// schedulers start programs that others have planted: at a time, at an event, or
// when something ends. In a fork they stand still.
var schedulers = []string{
	"cron", "crond", "atd", "anacron", "fcron", "systemd", "init", "systemd-udevd", "udevd", "mdev", "runsvdir", "s6-svscan", "supervisord", "inotifyd", "incrond",
}

// halts says whether a process of the clean machine stands still in a fork.
func halts(p client.ProcessInfo) bool {
	return p.PID == 1 || slices.Contains(schedulers, string(p.Name))
}

// toolchain are programs that verifiers run.
var toolchain = []string{
	"sh", "bash", "dash", "env", "busybox", "python", "python3", "pytest", "pip", "pip3", "uv", "node", "npm", "npx", "ruby", "perl", "php", "java", "javac", "mvn", "gradle",
	"go", "cargo", "rustc", "make", "cmake", "gcc", "g++", "cc", "c++", "clang", "git", "diff", "cmp", "grep", "sed", "awk", "cat", "test", "[", "timeout", "jq", "curl", "tar", "psql",
}

// loaders are what every program loads.
var loaders = []string{
	"/lib64/ld-linux-x86-64.so.2", "/lib/x86_64-linux-gnu/libc.so.6", "/usr/lib64/libc.so.6", "/lib/ld-musl-x86_64.so.1",
}

// modules are what Python loads unasked.
func modules() client.Search {
	s := client.Search{Directories: []string{"/usr/lib/python3/dist-packages"}, Names: []string{"sitecustomize.py", "usercustomize.py"}}
	for minor := 8; minor <= 15; minor++ {
		for _, dir := range []string{"/usr/lib/python3.%d", "/usr/local/lib/python3.%d/dist-packages", "/usr/local/lib/python3.%d/site-packages"} {
			s.Directories = append(s.Directories, fmt.Sprintf(dir, minor))
		}
	}
	return s
}

// settings are read and compared: what every program preloads, and what the kernel
// runs by itself.
var settings = []string{"/etc/ld.so.preload", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/sys/kernel/uevent_helper"}

// guarded are the files that are compared between fork and clean machine.
func (v *Verifier) guarded() client.Look {
	l := client.Look{Contents: settings}
	if !v.FreeToolchain {
		l.Files = append(l.Files, loaders...)
		l.Searches = []client.Search{{Directories: searchPath, Names: toolchain}, modules()}
	}
	l.Files = append(l.Files, v.Protect...)
	return l
}

// differences lists the files that are not in one survey what they are in the other.
func differences(clean, fork client.Survey) []string {
	have := map[string]client.SurveyedFile{}
	for _, f := range clean.Files {
		have[string(f.Path)] = f
	}
	var changed []string
	for _, f := range fork.Files {
		was, known := have[string(f.Path)]
		delete(have, string(f.Path))
		if !known || !sameFile(was, f) {
			changed = append(changed, string(f.Path))
		}
	}
	for path := range have { // gone
		changed = append(changed, path)
	}
	for _, r := range clean.Repeated {
		if !slices.Contains(fork.Repeated, r) {
			changed = append(changed, string(r.Path))
		}
	}
	slices.Sort(changed)
	return slices.Compact(changed)
}

// sameFile compares what the kernel keeps of a file. The time of its last change
// cannot be set by programs; files of the kernel have none that means something, and
// are read instead.
func sameFile(a, b client.SurveyedFile) bool {
	if strings.HasPrefix(string(a.Path), "/proc/") || strings.HasPrefix(string(a.Path), "/sys/") {
		return bytes.Equal(a.Content, b.Content)
	}
	return a.Kind == b.Kind && a.Size == b.Size && a.Mode == b.Mode && a.UID == b.UID && a.GID == b.GID &&
		a.Inode == b.Inode && a.ChangedNS == b.ChangedNS && bytes.Equal(a.Content, b.Content)
}

// sameProcess says whether two copies of a guest have the same process.
func sameProcess(a, b client.ProcessInfo) bool {
	return a.PID == b.PID && a.Start == b.Start && a.Program == b.Program && a.Inode == b.Inode
}
