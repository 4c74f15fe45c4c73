package policy

// CheckAddresses says which entry of a policy that can be compiled has a name, for somebody who knows none: an *EntryError with a
// reason, nil if there is none.
func (p Policy) CheckAddresses(reason string) error {
	for _, text := range p.Allow {
		if r, err := parseRule(text); err == nil && r.name != "" {
			return &EntryError{"allow", text, reason}
		}
	}
	return nil
}
