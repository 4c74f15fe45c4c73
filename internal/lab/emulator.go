package lab

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

const emulatorName = "qemu-system-x86_64"

// The directories below the emulator's prefix in which it looks for firmware and for the parts of itself that are separate.
var (
	emulatorData    = []string{"share/qemu", "share/seabios", "lib/ipxe/qemu"}
	emulatorModules = "lib/x86_64-linux-gnu/qemu"
)

// emulator is a program to start and what it needs to find its parts.
type emulator struct {
	path string
	args []string
	env  []string
	// faulty says that it is of a build whose faults we cannot mend, if it has them.
	faulty bool
}

// findEmulator returns this machine's emulator for a lab machine with so many processors: a copy in the cache with its faults
// mended, when we know how.
func findEmulator(c cache, cpus int) (emulator, error) {
	repairs := faults
	if cpus == 1 {
		repairs = append(repairs[:len(repairs):len(repairs)], slowPause)
	}
	original, err := findProgram(emulatorName)
	if err != nil {
		return emulator{}, err
	}
	if original, err = filepath.EvalSymlinks(original); err != nil {
		return emulator{}, err
	}
	key, err := statKey(original)
	if err != nil {
		return emulator{}, err
	}
	mended, err := c.get("emulator-"+keyOf(fmt.Sprint(repairs), key), func(path string) error {
		image, err := os.ReadFile(original)
		if err != nil {
			return err
		}
		if !mend(image, repairs) {
			image = nil // remembered as an empty file
		}
		return os.WriteFile(path, image, 0o755)
	})
	if err != nil {
		return emulator{}, fmt.Errorf("mend emulator: %w", err)
	}
	info, err := os.Stat(mended)
	if err != nil {
		return emulator{}, err
	}
	if info.Size() == 0 {
		return emulator{path: original, faulty: true}, nil
	}
	prefix := filepath.Dir(filepath.Dir(original))
	e := emulator{path: mended, env: []string{"QEMU_MODULE_DIR=" + filepath.Join(prefix, emulatorModules)}}
	for _, dir := range emulatorData {
		e.args = append(e.args, "-L", filepath.Join(prefix, dir))
	}
	return e, nil
}

// A repair replaces machine code. Its code is what is there, in hex, with ".." for bytes that differ from build to build; its
// replacement starts at the same place and has ".." for what stays and "@n" for a copy of the code's n-th byte.
type repair struct {
	fault             string
	code, replacement string
}

// faults are of QEMU 7.2's emulation of SVM, where its source (target/i386/tcg/sysemu/svm_helper.c and target/i386/cpu.c)
// departs from the AMD64 Architecture Programmer's Manual, volume 2, chapter 15. docs/lab.md tells what each did to guests.
var faults = []repair{
	{
		fault: "an interrupt that ends VMRUN in an interrupt shadow loses the shadow: hold it back for that one instruction",
		code: "89 ce 83 e6 0a 83 fe 0a 74 17 f6 c1 08 75 .. f6 80 .. .. .. .. 02 74 .. f6 80 .. .. .. .. 08 75 .. " +
			"ba 02 00 00 00",
		replacement: ".. .. .. .. .. .. .. .. .. 0e",
	},
	{
		fault: "an interrupt injected by VMRUN stays noted as an exception and may be delivered again, interrupts disabled or not",
		code: "44 89 ab .. .. .. .. 89 b3 .. .. .. .. c7 83 .. .. .. .. 00 00 00 00 48 c7 83 .. .. .. .. ff ff ff ff " +
			"f6 05 .. .. .. .. 02 0f 85 .. .. .. .. ba 01 00 00 00",
		replacement: ".. .. .. .. .. .. .. 66 0f 1f 44 00 00",
	},
	{
		fault:       "VMRUN sets a bit of a word that other threads change, without a lock: their change may be lost, an interrupt with it",
		code:        "81 8b .. .. ff ff 00 01 00 00 f6 83",
		replacement: "f0 0f ba ab @2 @3 @4 @5 08 90",
	},
	{
		fault:       "#VMEXIT clears that bit, likewise",
		code:        "81 a3 .. .. ff ff ff fe ff ff c7 83",
		replacement: "f0 0f ba b3 @2 @3 @4 @5 08 90",
	},
}

// slowPause is no fault but a good idea for several processors that share a thread: a PAUSE leaves the emulator's loop, so that
// another one gets its turn. With one processor it costs a thousand times what it counts, and guests with several vCPUs
// wait for each other in loops of PAUSE. Without it they do so at full speed.
var slowPause = repair{
	fault:       "PAUSE leaves the emulator's loop",
	code:        "41 83 e5 01 0f 84 .. .. .. .. 80 78 68 00 0f 85 .. .. .. .. 48 8b 1c 24 48 89 df",
	replacement: ".. .. .. .. 90 e9",
}

// mend applies all repairs to the image of a program, or none: each must find its code exactly once.
func mend(image []byte, repairs []repair) bool {
	places := make([]int, len(repairs))
	for i, r := range repairs {
		place, n := findCode(image, strings.Fields(r.code))
		if n != 1 {
			return false
		}
		places[i] = place
	}
	for i, r := range repairs {
		before := bytes.Clone(image[places[i] : places[i]+len(strings.Fields(r.code))])
		for j, token := range strings.Fields(r.replacement) {
			switch {
			case token == "..":
			case token[0] == '@':
				image[places[i]+j] = before[token[1]-'0']
			default:
				image[places[i]+j] = parseByte(token)
			}
		}
	}
	return true
}

// findCode returns the first place of code and how many there are. Code starts with a byte that is given.
func findCode(image []byte, code []string) (first, n int) {
	want, mask := make([]byte, len(code)), make([]byte, len(code))
	for i, token := range code {
		if token != ".." {
			want[i], mask[i] = parseByte(token), 0xff
		}
	}
	for at := 0; ; at++ {
		step := bytes.IndexByte(image[at:], want[0])
		if step < 0 || at+step+len(want) > len(image) {
			return first, n
		}
		at += step
		if matches(image[at:], want, mask) {
			if n == 0 {
				first = at
			}
			n++
		}
	}
}

func matches(image, want, mask []byte) bool {
	for i := range want {
		if image[i]&mask[i] != want[i] {
			return false
		}
	}
	return true
}

// parseByte reads two hex digits of our own tables.
func parseByte(token string) byte {
	b, err := hex.DecodeString(token)
	if err != nil || len(b) != 1 {
		panic("lab: bad byte in repair: " + token)
	}
	return b[0]
}
