package main

import (
	"reflect"
	"slices"
	"testing"
)

func TestFuzzFunctions(t *testing.T) {
	got, err := fuzzFunctions("testdata/sample_test.go")
	if want := []string{"FuzzReal"}; err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("found %q, %v; want %q", got, err, want)
	}
	if _, err := fuzzFunctions("testdata/absent_test.go"); err == nil {
		t.Error("no error for a file that does not exist")
	}
}

func TestFindLooksIntoPackages(t *testing.T) {
	got, err := find(t.Context(), []string{"github.com/forkvm/forkvm/internal/lab/..."})
	if err != nil {
		t.Fatal(err)
	}
	if want := (target{"github.com/forkvm/forkvm/internal/lab/wire", "FuzzRead"}); !slices.Contains(got, want) {
		t.Errorf("found %v, want %v among them", got, want)
	}
}
