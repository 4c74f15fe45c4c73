package lab

import (
	"fmt"
	"strconv"

	"github.com/forkvm/forkvm/internal/lab/wire"
)

// disk is one block device of the machine.
type disk struct {
	mount wire.Mount
	path  string // image on this machine
	// own says that the image is this machine's alone and goes with it; others get their changes on the side.
	own bool
}

// The descriptors that the emulator inherits, after the standard three.
const (
	portFD    = 3
	consoleFD = 4
)

// emulatorArgs is the emulator's command line, without its name.
func emulatorArgs(c Config, kernelImage, initramfs string, disks []disk) []string {
	args := []string{
		"-name", "forkvm-lab",
		// One thread for all processors: with a thread for each, QEMU before 8.1 may translate code while another processor
		// changes it, and keep the stale translation. The kernel changes its code all the time (static keys), and dies of the
		// breakpoints that it meets then.
		"-accel", "tcg,thread=single,tb-size=512",
		"-M", "q35,usb=off,sata=off,smbus=off,graphics=off,vmport=off",
		"-cpu", "EPYC-v3,+svm,+npt",
		"-m", strconv.Itoa(c.MemoryMiB),
		"-smp", strconv.Itoa(c.CPUs),
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
		"-kernel", kernelImage,
		"-initrd", initramfs,
		"-append", commandLine(c),
		"-chardev", fmt.Sprintf("socket,id=console,fd=%d", consoleFD), "-serial", "chardev:console",
		"-device", "virtio-serial-pci",
		"-chardev", fmt.Sprintf("socket,id=port,fd=%d", portFD), "-device", "virtserialport,chardev=port,name=forkvm.lab",
	}
	if c.Counted {
		// The seed and the clock are fixed too: two runs are then the same to the instruction.
		args = append(args, "-icount", "shift=0,sleep=off", "-seed", "1", "-rtc", "base=utc,clock=vm")
	}
	for i, d := range disks {
		snapshot := "on"
		if d.own {
			snapshot = "off"
		}
		args = append(args,
			"-drive", fmt.Sprintf("if=none,id=disk%d,format=raw,cache=unsafe,discard=unmap,detect-zeroes=off,snapshot=%s,file=%s",
				i, snapshot, escapeComma(d.path)),
			"-device", fmt.Sprintf("virtio-blk-pci,drive=disk%d,serial=%s", i, d.mount.Serial))
	}
	return args
}

// commandLine is the kernel's. A panic ends the machine at once, which -no-reboot makes the emulator's end. An idle processor
// halts: the other way, to poll in a loop of PAUSE for as long as the next event seems near, makes the emulator leave its
// run loop at each of them, and a machine with several guests then gets nothing done.
func commandLine(c Config) string {
	line := "console=ttyS0 reboot=t panic=-1 quiet nokaslr idle=halt"
	if c.Counted {
		line += " norandmaps" // the same addresses, the same work
	}
	return line
}

// escapeComma doubles commas, which separate the emulator's options.
func escapeComma(text string) string {
	var out []byte
	for i := 0; i < len(text); i++ {
		out = append(out, text[i])
		if text[i] == ',' {
			out = append(out, ',')
		}
	}
	return string(out)
}
