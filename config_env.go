package main

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/viper"

	"tidings/internal/msg"
	"tidings/sender"
)

// bindEnvironment lets every key be set by the environment, the settings of single providers included, and refuses
// variables that name no key: a typing error must not pass for a default.
func bindEnvironment(v *viper.Viper, environ []string) error {
	keys := map[string]string{envPrefix + "_CONFIG": ""}
	add := func(key string) { keys[envName(key)] = key }
	for _, key := range v.AllKeys() {
		add(key)
	}
	for _, c := range msg.Categories {
		add("policies." + c.String() + ".attempts")
	}
	for _, c := range msg.Channels {
		add("channels." + c.String() + ".providers")
		add("channels." + c.String() + ".slots")
	}
	for _, name := range providerNames(v, environ) {
		add("providers." + name + ".type")
		for _, key := range limitKeys {
			add("providers." + name + "." + key)
		}
		for _, key := range sender.Keys(providerType(v, name)) {
			add("providers." + name + "." + key)
			add("providers." + name + "." + key + fileSuffix)
		}
	}
	for _, entry := range environ {
		name, _, _ := strings.Cut(entry, "=")
		if !strings.HasPrefix(name, envPrefix+"_") {
			continue
		}
		key, ok := keys[name]
		if !ok {
			key, ok = matchStar(keys, name)
		}
		if !ok {
			return fmt.Errorf("the environment variable %s names no setting%s", name, hint(name))
		}
		if key == "" {
			continue
		}
		if err := v.BindEnv(key, name); err != nil {
			return err
		}
	}
	return nil
}

// matchStar finds the key of a map's entry: TIDINGS_PROVIDERS_BOTS_BOTS_OPS_URL sets providers.bots.bots.ops.url.
func matchStar(keys map[string]string, name string) (string, bool) {
	for pattern, key := range keys {
		before, after, ok := strings.Cut(pattern, "*")
		if !ok || !strings.HasPrefix(name, before) || !strings.HasSuffix(name, after) || len(name) <= len(before)+len(after) {
			continue
		}
		entry := strings.ToLower(name[len(before) : len(name)-len(after)])
		return strings.Replace(key, "*", entry, 1), true
	}
	return "", false
}

// hint says what is often missing.
func hint(name string) string {
	if strings.HasPrefix(name, envPrefix+"_PROVIDERS_") {
		return "; a provider that no file names needs its _TYPE, too"
	}
	return ""
}

func envName(key string) string {
	return envPrefix + "_" + strings.ToUpper(strings.ReplaceAll(key, ".", "_"))
}

// providerNames lists the providers of the file and the defaults, and those that only the environment gives a type.
func providerNames(v *viper.Viper, environ []string) []string {
	names := slices.Collect(maps.Keys(v.GetStringMap("providers")))
	for _, entry := range environ {
		name, _, _ := strings.Cut(entry, "=")
		if name, ok := strings.CutPrefix(name, envPrefix+"_PROVIDERS_"); ok {
			if name, ok := strings.CutSuffix(name, "_TYPE"); ok {
				names = append(names, strings.ToLower(name))
			}
		}
	}
	return names
}

func providerType(v *viper.Viper, name string) string {
	if kind := os.Getenv(envName("providers." + name + ".type")); kind != "" {
		return kind
	}
	return v.GetString("providers." + name + ".type")
}

// fileSuffix ends the twin of a key whose value is read from a file, so that secrets can stay out of the configuration.
const fileSuffix = "_file"

// readFiles puts what files hold in place of the keys that name them.
func readFiles(settings map[string]any) error {
	for key, value := range settings {
		if inner, ok := value.(map[string]any); ok {
			if err := readFiles(inner); err != nil {
				return fmt.Errorf("%s.%w", key, err)
			}
			continue
		}
		base, ok := strings.CutSuffix(key, fileSuffix)
		path, isText := value.(string)
		if !ok || !isText {
			continue
		}
		delete(settings, key)
		if path == "" {
			continue
		}
		if old, given := settings[base]; given && old != "" {
			return fmt.Errorf("%s%s and %s exclude each other", base, fileSuffix, base)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("%s%s: %w", base, fileSuffix, err)
		}
		settings[base] = strings.TrimSpace(string(text))
	}
	return nil
}
