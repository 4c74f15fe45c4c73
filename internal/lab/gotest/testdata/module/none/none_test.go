package none

import "testing"

// Boot has the name of something that needs KVM, and does not.
func Boot() {}

func TestBoot(t *testing.T) { Boot() }
