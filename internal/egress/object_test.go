package egress

import (
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"fmt"
	"os"
	"testing"
)

// TestObjectIsOfItsSource: the object that is shipped was compiled from the source beside it.
func TestObjectIsOfItsSource(t *testing.T) {
	source, err := os.ReadFile("egress.c")
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("%x", sha256.Sum256(source))
	if sourceHash != want {
		t.Errorf("zsource.go is of a source %s, egress.c is %s: make bpf", sourceHash, want)
	}
	f, err := elf.NewFile(bytes.NewReader(object))
	if err != nil {
		t.Fatal(err)
	}
	section := f.Section("forkvm.source")
	if section == nil {
		t.Fatal("egress.o does not say what it was compiled from")
	}
	content, err := section.Data()
	if err != nil || string(bytes.TrimRight(content, "\x00")) != want {
		t.Errorf("egress.o was compiled from a source %q (%v), egress.c is %s: make bpf", content, err, want)
	}
}
