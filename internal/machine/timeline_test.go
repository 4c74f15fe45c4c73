package machine

import (
	"reflect"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/linux"
)

func TestPhases(t *testing.T) {
	timeline := Timeline{{"a", 12 * time.Millisecond}, {"b", 12 * time.Millisecond}, {"c", 20 * time.Millisecond}}
	want := []Phase{{"a", 2}, {"b", 0}, {"c", 8}}
	if got := timeline.Phases(10 * time.Millisecond); !reflect.DeepEqual(got, want) {
		t.Errorf("phases are %v, not %v", got, want)
	}
}

func TestTimelineGoesForward(t *testing.T) {
	begin := linux.Monotonic()
	var timeline Timeline
	timeline.End("first")
	time.Sleep(time.Millisecond)
	timeline.End("second")
	for _, p := range timeline.Phases(begin) {
		if p.MS < 0 || p.Name == "second" && p.MS < 1 {
			t.Errorf("phase %s took %v ms", p.Name, p.MS)
		}
	}
}
