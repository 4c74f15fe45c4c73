package acpi

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the golden files anew")

// machine is a configuration with n processors and d virtio devices, at the
// places the real machine has them.
func machine(n, d int) Config {
	c := Config{
		CPUs:         n,
		Serial:       Serial{Port: 0x3f8, IRQ: 4},
		GenerationID: GenerationID{Address: GenerationIDAddress, GSI: 23},
		Power:        Power{SleepControl: 0x600, SleepStatus: 0x601, Reset: 0x604, ResetValue: 0x42},
		PVPanic:      0x505,
	}
	for i := range d {
		c.Virtio = append(c.Virtio, VirtioDevice{Base: 0xd0000000 + uint64(i)*0x1000, Size: 0x1000, GSI: uint32(5 + i)})
	}
	return c
}

var configs = map[string]Config{
	"bare":  {CPUs: 1},
	"small": machine(1, 3),
	"full":  machine(32, 18),
}

// parsed are the tables of an image, found the way a kernel finds them.
type parsed map[string][]byte

func parse(t *testing.T, tables Tables) parsed {
	t.Helper()
	at := func(address, n uint64) []byte {
		offset := address - tables.Address
		if address%16 != 0 && n > 4 || offset+n > uint64(len(tables.Image)) {
			t.Fatalf("address %#x (%d bytes) is not that of a table", address, n)
		}
		return tables.Image[offset : offset+n]
	}
	sum := func(name string, b []byte) {
		if checksum(b) != 0 {
			t.Errorf("%s: bad checksum", name)
		}
	}
	whole := func(address uint64) (string, []byte) {
		header := at(address, headerSize)
		b := at(address, uint64(binary.LittleEndian.Uint32(header[4:])))
		sum(string(b[:4]), b)
		return string(b[:4]), b
	}
	rsdp := at(tables.RSDP, rsdpSize)
	if string(rsdp[:8]) != "RSD PTR " {
		t.Fatalf("root pointer starts with %q", rsdp[:8])
	}
	sum("RSDP, first 20 bytes", rsdp[:20])
	sum("RSDP", rsdp)
	found := parsed{}
	name, xsdt := whole(binary.LittleEndian.Uint64(rsdp[24:]))
	found[name] = xsdt
	for entries := xsdt[headerSize:]; len(entries) > 0; entries = entries[8:] {
		name, b := whole(binary.LittleEndian.Uint64(entries))
		found[name] = b
	}
	_, found["DSDT"] = whole(binary.LittleEndian.Uint64(found["FACP"][offsetXDSDT:]))
	return found
}

func TestTablesAreGolden(t *testing.T) {
	for name, c := range configs {
		tables, err := Build(c)
		if err != nil {
			t.Fatal(err)
		}
		for signature, got := range parse(t, tables) {
			path := filepath.Join("testdata", name+"-"+strings.ToLower(signature)+".aml")
			if *update {
				if err := os.WriteFile(path, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("%s differs; if that is right, run go test -update", path)
			}
		}
	}
}

// Intel's compiler, an independent implementation, reads every table, has
// nothing to say about it, and makes the same bytes of what it has read.
func TestCompilerReadsTables(t *testing.T) {
	iasl, err := exec.LookPath("iasl")
	if err != nil {
		t.Skip("iasl is not installed: apt-get install acpica-tools")
	}
	for name, c := range configs {
		tables, err := Build(c)
		if err != nil {
			t.Fatal(err)
		}
		for signature, want := range parse(t, tables) {
			t.Run(name+"/"+signature, func(t *testing.T) { recompile(t, iasl, signature, want) })
		}
	}
}

func recompile(t *testing.T, iasl, signature string, want []byte) {
	dir := t.TempDir()
	run := func(args ...string) string {
		cmd := exec.Command(iasl, args...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("iasl %v: %v\n%s", args, err, out)
		}
		return string(out)
	}
	if err := os.WriteFile(filepath.Join(dir, "table.dat"), want, 0o600); err != nil {
		t.Fatal(err)
	}
	if out := run("-d", "table.dat"); strings.Contains(out, "rror") && !strings.Contains(out, "0 Errors") {
		t.Fatalf("disassembly: %s", out)
	}
	out := run("-p", "again", "table.dsl")
	if signature == "DSDT" && !strings.Contains(out, "0 Errors, 0 Warnings") {
		source, _ := os.ReadFile(filepath.Join(dir, "table.dsl"))
		t.Errorf("compilation: %s\n%s", out, source)
	}
	got, err := os.ReadFile(filepath.Join(dir, "again.aml"))
	if err != nil {
		t.Fatal(err)
	}
	// The header names the compiler, and with it changes the checksum.
	if !bytes.Equal(got[headerSize:], want[headerSize:]) {
		t.Errorf("%d bytes become %d other ones when recompiled", len(want), len(got))
	}
}

func TestPackageLength(t *testing.T) {
	for _, c := range []struct {
		body int
		want string
	}{
		{0, "\x01"},
		{62, "\x3f"},
		{63, "\x41\x04"}, // 65 with its two bytes
		{4093, "\x4f\xff"},
		{4094, "\x81\x00\x01"},
		{1<<20 - 4, "\x8f\xff\xff"},
		{1<<20 - 3, "\xc1\x00\x00\x01"},
	} {
		got := sized(make(aml, c.body))
		if prefix := string(got[:len(got)-c.body]); prefix != c.want {
			t.Errorf("%d bytes: length %x, want %x", c.body, prefix, c.want)
		}
	}
}

func TestIntegersAndIDs(t *testing.T) {
	for v, want := range map[uint64]string{
		0: "\x00", 1: "\x01", 2: "\x0a\x02", 255: "\x0a\xff", 256: "\x0b\x00\x01",
		1 << 16: "\x0c\x00\x00\x01\x00", 1 << 32: "\x0e\x00\x00\x00\x00\x01\x00\x00\x00",
	} {
		if got := string(integer(v)); got != want {
			t.Errorf("%d: %x, want %x", v, got, want)
		}
	}
	if got := string(eisaID("PNP0501")); got != "\x0c\x41\xd0\x05\x01" {
		t.Errorf("PNP0501: %x", got)
	}
	if got := string(eisaID("ACPI0A3F"[1:])); len(got) != 5 {
		t.Errorf("%x", got)
	}
}

func TestProcessors(t *testing.T) {
	for _, cpus := range []int{1, 2, 31, 32, MaxCPUs} {
		tables, err := Build(Config{CPUs: cpus})
		if err != nil {
			t.Fatal(err)
		}
		madt := parse(t, tables)["APIC"]
		ids := []int{}
		for entries := madt[headerSize+8:]; len(entries) > 0; entries = entries[entries[1]:] {
			if entries[0] == 0 {
				if entries[2] != entries[3] || entries[4] != 1 {
					t.Errorf("%d CPUs: entry %x", cpus, entries[:8])
				}
				ids = append(ids, int(entries[3]))
			}
		}
		if len(ids) != cpus || ids[cpus-1] != cpus-1 {
			t.Errorf("%d CPUs: APIC ids %v", cpus, ids)
		}
	}
}

func TestPowerPorts(t *testing.T) {
	tables, err := Build(machine(1, 0))
	if err != nil {
		t.Fatal(err)
	}
	fadt := parse(t, tables)["FACP"]
	for name, c := range map[string]struct {
		offset int
		port   uint64
	}{
		"sleep control": {offsetSleepControl, 0x600},
		"sleep status":  {offsetSleepStatus, 0x601},
		"reset":         {offsetReset, 0x604},
	} {
		register := fadt[c.offset:]
		if register[0] != 1 || register[1] != 8 || binary.LittleEndian.Uint64(register[4:]) != c.port {
			t.Errorf("%s register: %x", name, register[:12])
		}
	}
	if fadt[offsetResetValue] != 0x42 || SleepOff != 0x34 {
		t.Errorf("reset value %#x, sleep value %#x", fadt[offsetResetValue], SleepOff)
	}
}

func TestBadConfigs(t *testing.T) {
	change := func(f func(c *Config)) Config {
		c := machine(1, 2)
		f(&c)
		return c
	}
	for name, c := range map[string]Config{
		"no processor":        {},
		"too many processors": {CPUs: MaxCPUs + 1},
		"interrupt twice":     change(func(c *Config) { c.Virtio[1].GSI = c.Virtio[0].GSI }),
		"serial's interrupt":  change(func(c *Config) { c.Virtio[0].GSI = 4 }),
		"no such interrupt":   change(func(c *Config) { c.GenerationID.GSI = Pins }),
		"window above 4 GiB":  change(func(c *Config) { c.Virtio[0].Base = 1<<32 - 0x800 }),
		"empty window":        change(func(c *Config) { c.Virtio[0].Size = 0 }),
		"unaligned id":        change(func(c *Config) { c.GenerationID.Address += 4 }),
	} {
		var bad *ConfigError
		if _, err := Build(c); !errors.As(err, &bad) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
