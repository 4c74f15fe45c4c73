package tapnet

import (
	"testing"

	"github.com/forkvm/forkvm/internal/egress/source"
)

// TestObjectIsOfItsSource: the object that is shipped was compiled from the source beside it.
func TestObjectIsOfItsSource(t *testing.T) {
	if err := source.Check("tap.c", object, sourceHash); err != nil {
		t.Error(err)
	}
}
