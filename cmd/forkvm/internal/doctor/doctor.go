// Package doctor looks at a machine and says whether forkvm can work on it, and
// what to do where it cannot.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/egress"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/tapnet"
	"github.com/forkvm/forkvm/kvm"
	"github.com/forkvm/forkvm/kvm/probe"
)

// Schema is the version of Report's JSON form.
const Schema = "forkvm/doctor/v1"

// Status is the outcome of a check.
type Status string

const (
	OK      Status = "ok"
	Warning Status = "warning" // works, with a limit
	Failed  Status = "failed"  // VMs cannot run
)

// Check is one thing that was looked at.
type Check struct {
	Name   string `json:"name"`
	Status Status `json:"status"`
	// Detail is what was found.
	Detail string `json:"detail"`
	// Fix is what to do; empty if nothing.
	Fix string `json:"fix,omitempty"`
}

// Report is everything that was looked at.
type Report struct {
	Schema string `json:"schema"`
	// Usable: no check failed.
	Usable bool    `json:"usable"`
	Checks []Check `json:"checks"`
}

// Config says what to look at.
type Config struct {
	DataDir, RunDir string
	// OpenNode makes and opens the directories as every command does.
	OpenNode func() error
}

// Run looks at everything. It makes the node's directories if they are missing,
// like every command that uses them.
func Run(ctx context.Context, c Config) Report {
	r := Report{Schema: Schema, Usable: true}
	r.add(checkKVM(ctx), checkKernel(), checkMemory(), checkDirectories(c), checkSpace(c.DataDir), checkFiles(c.DataDir), checkHugePages(c.RunDir), checkEnforcement(), checkTap())
	return r
}

func (r *Report) add(checks ...Check) {
	for _, c := range checks {
		r.Checks = append(r.Checks, c)
		if c.Status == Failed {
			r.Usable = false
		}
	}
}

// checkKVM runs guest code: that the device opens says little.
func checkKVM(ctx context.Context) Check {
	c := Check{Name: "kvm"}
	sys, err := kvm.Open()
	if err != nil {
		return c.fromOpen(err)
	}
	defer sys.Close()
	report, err := probe.Run(ctx, sys)
	if err != nil {
		return c.failed(err.Error(), "the device opens, but no scratch vm can be made on it: look for its messages with dmesg")
	}
	var unusable *probe.UnusableError
	if errors.As(report.Err(), &unusable) {
		return c.failed(unusable.Error(), unusable.Fix())
	}
	c.Status = OK
	c.Detail = fmt.Sprintf("/dev/kvm runs Linux guests; a short loop ran %.0f million instructions a second", report.Speed/1e6)
	return c
}

func (c Check) fromOpen(err error) Check {
	var device *kvm.DeviceError
	var missing *kvm.MissingError
	switch {
	case errors.As(err, &device):
		return c.failed(fmt.Sprintf("open %s: %v", device.Path, device.Err), device.Fix+processorHint(device.Err))
	case errors.As(err, &missing):
		return c.failed(err.Error(), "boot a newer host kernel (Linux 5.10 or later)")
	}
	return c.failed(err.Error(), "check that the kernel has KVM")
}

// processorHint says, when there is no device, whether this processor could have
// one at all.
func processorHint(err error) string {
	if !errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	data, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return ""
	}
	for _, flag := range strings.Fields(string(data)) {
		if flag == "vmx" || flag == "svm" {
			return " (this processor has the extension: " + flag + ")"
		}
	}
	return " (this processor shows neither vmx nor svm)"
}

func (c Check) failed(detail, fix string) Check {
	c.Status, c.Detail, c.Fix = Failed, detail, fix
	return c
}

func (c Check) warning(detail, fix string) Check {
	c.Status, c.Detail, c.Fix = Warning, detail, fix
	return c
}

func (c Check) ok(detail string) Check {
	c.Status, c.Detail = OK, detail
	return c
}

// checkKernel tells of what newer host kernels do faster.
func checkKernel() Check {
	c := Check{Name: "kernel"}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return c.warning(err.Error(), "")
	}
	release := unix.ByteSliceToString(u.Release[:])
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return c.warning("Linux "+release, "")
	}
	if major < 6 || major == 6 && minor < 7 {
		return c.warning("Linux "+release+": snapshots and forks look for written pages the slow way",
			"Linux 6.7 or later finds them with one system call")
	}
	return c.ok("Linux " + release)
}

// checkEnforcement tells whether network policies hold for a VM's process, too.
func checkEnforcement() Check {
	c := Check{Name: "network_enforcement"}
	err := egress.Available()
	var unavailable *egress.UnavailableError
	switch {
	case errors.As(err, &unavailable):
		return c.warning("VM processes alone enforce network policies: "+unavailable.Cause.Error(), unavailable.Fix)
	case err != nil:
		return c.warning(err.Error(), "")
	}
	return c.ok("the kernel enforces network policies below the processes of VMs")
}

// checkTap tells whether network cards can have TAP devices.
func checkTap() Check {
	c := Check{Name: "network_tap"}
	err := tapnet.Available()
	var unavailable *tapnet.UnavailableError
	switch {
	case errors.As(err, &unavailable):
		return c.warning("network cards cannot have TAP devices: "+unavailable.Cause.Error(), unavailable.Fix)
	case err != nil:
		return c.warning(err.Error(), "")
	}
	if err := tapnet.IPv6(); err != nil {
		return c.ok("network cards can have TAP devices, behind which is nothing but IPv4: " + err.Error())
	}
	return c.ok("network cards can have TAP devices")
}

// Sizes below which VMs are going to be in trouble, in bytes.
const (
	littleMemory = 1 << 30
	littleSpace  = 4 << 30
)

func checkMemory() Check {
	c := Check{Name: "memory"}
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return c.warning(err.Error(), "")
	}
	total, available := memInfo(string(data))
	detail := fmt.Sprintf("%d MiB available of %d MiB", available>>20, total>>20)
	if available < littleMemory {
		return c.warning(detail, "free some memory: a VM needs what its guest writes, up to its --memory")
	}
	return c.ok(detail)
}

// memInfo reads total and available memory, in bytes, from /proc/meminfo.
func memInfo(text string) (total, available uint64) {
	for line := range strings.Lines(text) {
		var kilobytes uint64
		if n, _ := fmt.Sscanf(line, "MemTotal: %d kB", &kilobytes); n == 1 {
			total = kilobytes << 10
		}
		if n, _ := fmt.Sscanf(line, "MemAvailable: %d kB", &kilobytes); n == 1 {
			available = kilobytes << 10
		}
	}
	return total, available
}

// checkDirectories also finds a run directory whose path is too long for
// sockets: opening the node refuses it.
func checkDirectories(c Config) Check {
	check := Check{Name: "directories"}
	if err := c.OpenNode(); err != nil {
		return check.failed(err.Error(), "give directories that this user can write to with --data-dir and --run-dir, "+
			"or FORKVM_DATA_DIR and FORKVM_RUN_DIR")
	}
	return check.ok("data in " + c.DataDir + ", running VMs in " + c.RunDir)
}

func checkSpace(dir string) Check {
	c := Check{Name: "disk_space"}
	free, err := linux.FreeBytes(dir)
	if err != nil {
		return c.warning(fmt.Sprintf("look at %s: %v", dir, err), "")
	}
	detail := fmt.Sprintf("%d MiB free in %s", free>>20, dir)
	if free < littleSpace {
		return c.warning(detail, "free some space, or put --data-dir on another file system: images, snapshots and what guests write are there")
	}
	return c.ok(detail)
}

// checkFiles tries what running disks and snapshots are made with.
func checkFiles(dir string) Check {
	c := Check{Name: "file_system"}
	f, err := linux.UnnamedFile(dir, 0o600)
	if err != nil {
		return c.failed(fmt.Sprintf("%v: this file system has no unnamed files", err),
			"put --data-dir on ext4, xfs, btrfs or tmpfs")
	}
	defer f.Close()
	return c.ok("has what disks and snapshots need")
}

// checkHugePages makes one in the run directory, where clones would have them.
func checkHugePages(dir string) Check {
	c := Check{Name: "huge_pages"}
	const slower = "clones map what they read in small pages, which takes them longer"
	if !linux.InMemory(dir) {
		return c.warning(dir+" is not in memory: "+slower, "put --run-dir on a tmpfs, such as /run")
	}
	f, err := linux.UnnamedFile(dir, 0o600)
	if err == nil {
		defer f.Close()
		err = f.Truncate(linux.HugePageSize)
	}
	if err == nil {
		err = linux.Collapse(f, 0, linux.HugePageSize)
	}
	if err != nil {
		return c.warning(fmt.Sprintf("%v: %s", err, slower),
			"use Linux 6.1 or later with transparent huge pages (/sys/kernel/mm/transparent_hugepage)")
	}
	return c.ok("clones share what they read in huge pages, in " + dir)
}
