package lab

import (
	"bytes"
	"os"
	"testing"
)

func TestMend(t *testing.T) {
	r := []repair{
		{code: "aa .. cc dd", replacement: ".. 11 @1"},
		{code: "ee 01", replacement: "ff"},
	}
	image := []byte{0, 0xaa, 0x42, 0xcc, 0xdd, 0xee, 0x01, 0xee}
	if !mend(image, r) {
		t.Fatal("code not found")
	}
	if want := []byte{0, 0xaa, 0x11, 0x42, 0xdd, 0xff, 0x01, 0xee}; !bytes.Equal(image, want) {
		t.Errorf("image is %x, want %x", image, want)
	}
}

// All or nothing, and never where it is not certain.
func TestMendRefuses(t *testing.T) {
	r := []repair{{code: "aa bb", replacement: "cc"}, {code: "dd", replacement: "ee"}}
	for name, image := range map[string][]byte{
		"missing":   {0xaa, 0xbb, 0},
		"ambiguous": {0xaa, 0xbb, 0xdd, 0xaa, 0xbb},
		"cut short": {0xdd, 0xaa},
		"empty":     {},
	} {
		before := bytes.Clone(image)
		if mend(image, r) {
			t.Errorf("%s: mended", name)
		}
		if !bytes.Equal(image, before) {
			t.Errorf("%s: image changed", name)
		}
	}
}

// The repairs fit the emulator of the Debian release that we support. On another one this test has nothing to say.
func TestRepairsFitDebian12(t *testing.T) {
	release, _ := os.ReadFile("/etc/debian_version")
	if !bytes.HasPrefix(release, []byte("12.")) {
		t.Skip("not Debian 12")
	}
	path, err := findProgram(emulatorName)
	if err != nil {
		t.Skip(err)
	}
	image, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !mend(image, append(faults[:len(faults):len(faults)], slowPause)) {
		t.Error("this build of QEMU is not known to the table of repairs; the lab may hang (docs/lab.md, \"The emulator's faults\")")
	}
}
